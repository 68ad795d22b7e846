"""The training loop: exact resume, kills, signals, skipped steps, one divisor for the whole batch."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash import checkpoint
from dflash.config import OptimOptions, TrainConfig
from dflash.data.rows import batches
from dflash.drafter import objectives
from dflash.drafter.objectives import CrossEntropy, Targets
from dflash.errors import CheckpointError, Diverged, OutputError, Stopped
from dflash.features import FeatureSource
from dflash.metrics_file import read
from dflash.parts import Parts, build
from dflash.step import Stepper
from dflash.train import Training, train
from tests.training import curve, printed, quiet_log, small_config, write_chats


def newest_weights(config: TrainConfig) -> dict[str, Tensor]:
    return checkpoint.load(checkpoint.newest(config.output / "checkpoints")).weights


def same_weights(a: TrainConfig, b: TrainConfig) -> bool:
    x, y = newest_weights(a), newest_weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def test_a_run_learns_evaluates_exports_and_reads_its_export_back(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir, steps=30)
    log = quiet_log()
    assert train(config, log) == 0
    losses = [record["loss"] for record in read(config.output / "metrics.jsonl", "step")]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    result = json.loads((config.output / "evaluation.json").read_text())
    assert result["identical"] == result["prompts"] == 2
    assert result["export_max_abs_difference"] == 0.0
    assert (config.output / "export" / "config.json").is_file()
    for name in ("tau", "acceptance by slot", "tokens a target forward", "speed-up", "same as greedy", "export"):
        assert name in printed(log)


def test_the_header_says_what_runs_and_why(tmp_path: Path, tiny_target_dir: Path) -> None:
    log = quiet_log()
    train(small_config(tmp_path, tiny_target_dir, steps=1), log)
    text = printed(log)
    for part in (str(tiny_target_dir), "M parameters", "strategy sdpa, kernel sdpa", "auto on cpu", torch.__version__):
        assert part in text
    assert "seed 0" in text


def stop_at_step(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Sends a real signal to this process in the middle of a step."""
    original = Stepper.step

    def interrupted(self: Stepper, index: int, micro_batches: Sequence[object]) -> object:
        if index == step:
            signal.raise_signal(number)
        return original(self, index, micro_batches)  # type: ignore[arg-type]

    monkeypatch.setattr(Stepper, "step", interrupted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, tiny_target_dir: Path, number: signal.Signals, code: int
) -> None:
    whole = small_config(tmp_path, tiny_target_dir)
    train(whole, quiet_log())
    parted = replace(whole, output=tmp_path / "parted")
    with pytest.MonkeyPatch.context() as patch:
        stop_at_step(patch, 4, number)
        with pytest.raises(Stopped) as stopped:
            train(parted, quiet_log())
    assert stopped.value.exit_code == code
    assert f"dflash train --resume --output {parted.output}" in str(stopped.value)
    assert checkpoint.saved_steps(parted.output / "checkpoints")[-1] == 5
    train(replace(parted, resume=True), quiet_log())
    assert curve(parted.output) == curve(whole.output)
    assert same_weights(parted, whole)


def test_another_seed_gives_another_curve(tmp_path: Path, tiny_target_dir: Path) -> None:
    first = small_config(tmp_path, tiny_target_dir, steps=2)
    second = replace(first, seed=1, output=tmp_path / "second")
    train(first, quiet_log())
    train(second, quiet_log())
    assert curve(first.output) != curve(second.output)


# trains, forked, with a SIGKILL at the n-th file-system call of the save after step 6; then resumes, forked
KILLED_IN_SAVE = textwrap.dedent("""
    import os, shutil, signal, sys
    from dataclasses import replace
    from pathlib import Path
    from dflash import checkpoint
    from dflash.parts import build
    from dflash.train import train
    from tests.training import quiet_log, small_config
    base, target = Path(sys.argv[1]), Path(sys.argv[2])
    calls = 0
    def in_child(work):
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    def deadly_call(original, deadly):
        def call(*arguments, **options):
            global calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)
        return call
    def arm(deadly):
        real = checkpoint.save
        def save(root, step, content):
            if step == 6:
                os.fsync, os.rename = deadly_call(os.fsync, deadly), deadly_call(os.rename, deadly)
                checkpoint.save_file = deadly_call(checkpoint.save_file, deadly)
            return real(root, step, content)
        checkpoint.save = save
    def killed(config, deadly):
        arm(deadly)
        train(config, quiet_log())
    config = small_config(base, target)
    build(config)  # imports what every child would import again
    print(in_child(lambda: train(config, quiet_log())), flush=True)
    for deadly in map(int, sys.argv[3:]):
        parted = replace(config, output=base / str(deadly))
        code = in_child(lambda: killed(parted, deadly))
        again = in_child(lambda: train(replace(parted, resume=True), quiet_log()))
        print(code, again, flush=True)
""")


def test_a_sigkill_in_the_middle_of_a_save_changes_nothing_once_resumed(tmp_path: Path, tiny_target_dir: Path) -> None:
    # the second file half done, the state not yet on disk, just before the rename, just after it
    points = ["3", "5", "7", "8"]
    command = [sys.executable, "-c", KILLED_IN_SAVE, str(tmp_path), str(tiny_target_dir), *points]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[1], env=environment
    )
    assert child.stdout.split() == ["0", *["-9", "0"] * len(points)], child.stderr
    whole = curve(tmp_path / "run")
    assert len(whole) == 8
    assert all(curve(tmp_path / point) == whole for point in points)
    for name in (checkpoint.WEIGHTS, checkpoint.TRAINER):
        files = [path / "checkpoints/step-00000008" / name for path in tmp_path.iterdir() if path.is_dir()]
        assert len(files) == 1 + len(points)
        assert len({file.read_bytes() for file in files}) == 1


def test_a_stop_during_an_evaluation_redoes_it_when_resumed(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, tiny_target_dir)
    original = Training.guard

    def interrupted(self: Training, done: int, total: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        original(self, done, total)

    monkeypatch.setattr(Training, "guard", interrupted)
    with pytest.raises(Stopped):
        train(config, quiet_log())
    assert read(config.output / "metrics.jsonl", "eval") == []
    monkeypatch.undo()
    assert train(replace(config, resume=True), quiet_log()) == 0
    assert [record["step"] for record in read(config.output / "metrics.jsonl", "eval")] == [8]


def test_the_drafter_is_back_in_training_mode_after_an_evaluation(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    original = Stepper.forward_backward

    def spying(self: Stepper, *arguments: object) -> object:
        modes.append(self.parts.drafter.training)
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Stepper, "forward_backward", spying)
    config = small_config(tmp_path, tiny_target_dir, steps=4)
    train(replace(config, eval=replace(config.eval, every=2)), quiet_log())
    assert modes == [True] * 4


def gradients(config: TrainConfig, rows: int, accumulate: int) -> dict[str, Tensor]:
    """The gradient that the first optimizer step of four rows uses."""
    data = replace(config.data, batch_rows=rows)
    config = replace(config, data=data, optim=replace(config.optim, accumulate=accumulate, clip=1e9))
    parts = build(config)
    source = FeatureSource(parts.target, None, "online", parts.drafter.target_layer_ids)
    stream = batches(parts.store, config.data, config.seed)
    Stepper(config, parts, source, 10).step(0, list(islice(stream, accumulate)))
    return {name: parameter.grad.clone() for name, parameter in parts.parameters.items() if parameter.grad is not None}


def test_four_rows_give_one_gradient_however_they_are_split(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir)
    # few anchors in some rows and many in others: a mean of means would show
    write_chats(tmp_path / "chats.jsonl", 3, words=20)
    with (tmp_path / "chats.jsonl").open("a") as stream:
        stream.write(json.dumps({"prompt": "Say", "completion": "one two three"}) + "\n")
    config = replace(config, data=replace(config.data, pack=False, train=str(tmp_path / "chats.jsonl")))
    whole = gradients(config, rows=4, accumulate=1)
    halves, quarters = gradients(config, 2, 2), gradients(config, 1, 4)
    for name in whole:
        scale = whole[name].abs().max()
        torch.testing.assert_close(halves[name], whole[name], rtol=0, atol=1e-5 * scale.item())
        torch.testing.assert_close(quarters[name], whole[name], rtol=0, atol=1e-5 * scale.item())
    wrong = mean_of_means(config)
    assert (wrong["fc.weight"] - whole["fc.weight"]).abs().max() > 1e-2 * whole["fc.weight"].abs().max()


def mean_of_means(config: TrainConfig) -> dict[str, Tensor]:
    """The control: each micro-batch divided by its own sum of weights."""
    parts = build(config)
    source = FeatureSource(parts.target, None, "online", parts.drafter.target_layer_ids)
    stepper = Stepper(config, parts, source, 10)
    total: dict[str, Tensor] = {}
    for batch in islice(batches(parts.store, config.data, config.seed), 4):
        parts.optimizer.zero_grad(set_to_none=True)
        metrics = stepper.forward_backward(batch, source.rows(batch), stepper.anchors(batch))
        for name, parameter in parts.parameters.items():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad / metrics.weight_sum.float() / 4
    return total


def test_the_schedule_counts_optimizer_steps_and_not_micro_batches(tmp_path: Path, tiny_target_dir: Path) -> None:
    one = small_config(tmp_path, tiny_target_dir, steps=4)
    three = replace(one, output=tmp_path / "three", optim=replace(one.optim, accumulate=3))
    train(one, quiet_log())
    train(three, quiet_log())
    rates = [[record["learning_rate"] for record in read(c.output / "metrics.jsonl", "step")] for c in (one, three)]
    assert rates[0] == rates[1]
    tokens = [sum(record["tokens"] for record in read(c.output / "metrics.jsonl", "step")) for c in (one, three)]
    assert tokens[1] > 2 * tokens[0]


def test_without_steps_the_epochs_say_how_long_a_run_is(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir, steps=None)
    train(replace(config, optim=replace(config.optim, epochs=2, accumulate=5)), quiet_log())
    records = read(config.output / "metrics.jsonl", "step")
    assert {record["epoch"] for record in records} == {0, 1}
    state = checkpoint.read_state(checkpoint.newest(config.output / "checkpoints"))
    assert state["state"]["progress"]["tokens"] == sum(record["tokens"] for record in records)


def test_batches_without_a_valid_anchor_are_skipped_and_counted(tmp_path: Path, tiny_target_dir: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    with (tmp_path / "chats.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"prompt": f"Say {i}", "completion": "7"}) + "\n" for i in range(4))
    config = small_config(tmp_path, tiny_target_dir)
    train(replace(config, data=replace(config.data, pack=False)), quiet_log())
    skipped = read(config.output / "metrics.jsonl", "skip")
    trained = read(config.output / "metrics.jsonl", "step")
    assert {record["reason"] for record in skipped} == {"no valid anchor"}
    assert (len(skipped), len(trained)) == (4, 4)
    assert all(torch.isfinite(weight).all() for weight in newest_weights(config).values())
    state = checkpoint.read_state(checkpoint.newest(config.output / "checkpoints"))["state"]["progress"]
    assert state["empty_batches"] == 4


def test_data_without_any_valid_anchor_stops_with_the_reason(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.train.MAX_EMPTY_STEPS", 3)
    write_chats(tmp_path / "chats.jsonl", 8, words=1)
    config = small_config(tmp_path, tiny_target_dir, steps=50)
    config = replace(config, drafter=replace(config.drafter, block_size=16))
    with pytest.raises(Diverged, match=r"3 steps in a row had no answer of 16 tokens"):
        train(config, quiet_log())


class SometimesNan(CrossEntropy):
    """A loss that is not a number at the calls named in `bad`."""

    calls = 0
    bad: frozenset[int] = frozenset()

    def __call__(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        loss_sum, weight_sum = super().__call__(logits, targets)
        type(self).calls += 1
        return (loss_sum * float("nan") if self.calls in self.bad else loss_sum), weight_sum


def test_a_step_that_is_not_finite_leaves_the_weights_and_is_counted(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "ce", SometimesNan)
    monkeypatch.setattr(SometimesNan, "calls", 0)
    monkeypatch.setattr(SometimesNan, "bad", frozenset({2, 5}))
    config = small_config(tmp_path, tiny_target_dir)
    train(config, quiet_log())
    assert [record["step"] for record in read(config.output / "metrics.jsonl", "skip")] == [2, 5]
    assert all(torch.isfinite(weight).all() for weight in newest_weights(config).values())


def test_steps_that_stay_not_finite_stop_the_run(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "ce", SometimesNan)
    monkeypatch.setattr(SometimesNan, "calls", 0)
    monkeypatch.setattr(SometimesNan, "bad", frozenset(range(4, 100)))
    config = small_config(tmp_path, tiny_target_dir)
    with pytest.raises(Diverged, match=r"step 6: .* 3 times in a row; lower --optim\.lr"):
        train(replace(config, optim=replace(config.optim, max_nonfinite=3)), quiet_log())
    assert checkpoint.saved_steps(config.output / "checkpoints") == [3]


def test_bfloat16_arithmetic_moves_float32_norm_weights(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir, steps=2, dtype="bfloat16")
    train(replace(config, optim=OptimOptions(lr=1e-4)), quiet_log())
    norm = newest_weights(config)["norm.weight"]
    assert norm.dtype == torch.float32
    assert (norm != 1.0).float().mean() > 0.9
    assert (norm.bfloat16() == 1.0).all()  # the control: masters in bfloat16 would not have moved


def test_online_cached_and_stored_features_train_the_same_drafter(tmp_path: Path, tiny_target_dir: Path) -> None:
    online = small_config(tmp_path, tiny_target_dir, steps=4)
    store = tmp_path / "features"
    caching = replace(online.data, features="cache", feature_store=store)
    cached = replace(online, output=tmp_path / "cached", data=caching)
    offline = replace(cached, output=tmp_path / "offline", data=replace(cached.data, features="offline"))
    for config in (online, cached, offline):
        train(config, quiet_log())
    assert curve(online.output) == curve(cached.output) == curve(offline.output)
    assert same_weights(online, offline)


@pytest.mark.parametrize("strategy", ["eager", "sdpa", "locked-compile", "force-compile", "auto"])
def test_every_strategy_trains_on_a_cpu_and_names_its_kernel(
    tmp_path: Path, tiny_target_dir: Path, strategy: str
) -> None:
    log = quiet_log()
    config = small_config(tmp_path, tiny_target_dir, steps=2, attn_strategy=strategy)
    assert train(config, log) == 0
    assert "kernel sdpa" in printed(log)
    assert f"strategy {'sdpa' if strategy == 'auto' else strategy}" in printed(log)


def test_checkpointing_layers_changes_memory_and_not_the_curve(tmp_path: Path, tiny_target_dir: Path) -> None:
    plain = small_config(tmp_path, tiny_target_dir, steps=3)
    recomputed = replace(plain, output=tmp_path / "recomputed", checkpoint_layers=True)
    train(plain, quiet_log())
    train(recomputed, quiet_log())
    assert curve(plain.output) == curve(recomputed.output)


def test_a_corrupt_newest_checkpoint_is_refused_and_the_earlier_one_resumes(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = small_config(tmp_path, tiny_target_dir)
    train(config, quiet_log())
    whole = curve(config.output)
    newest = checkpoint.newest(config.output / "checkpoints")
    weights = newest / checkpoint.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"delete {newest.name} to go on from an earlier checkpoint"):
        train(replace(config, resume=True), quiet_log())
    weights.unlink()
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    train(replace(config, resume=True), quiet_log())
    assert curve(config.output) == whole


def test_a_full_disk_in_the_middle_of_a_run_keeps_the_earlier_checkpoint(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, tiny_target_dir)
    real = checkpoint.save_file
    calls = 0

    def full_after_two(tensors: dict[str, Tensor], path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full_after_two)
    with pytest.raises(OutputError, match="no space left; make room, then go on with --resume"):
        train(config, quiet_log())
    assert checkpoint.saved_steps(config.output / "checkpoints") == [3]
    monkeypatch.undo()
    assert train(replace(config, resume=True), quiet_log()) == 0


def test_a_run_of_another_target_is_not_resumed(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir, steps=1)
    train(config, quiet_log())
    parts: Parts = build(config)
    path = checkpoint.newest(config.output / "checkpoints")
    loaded = checkpoint.load(path)
    state = {**loaded.state, "target": "another"}
    checkpoint.save(path.parent, 1, checkpoint.Checkpoint(loaded.weights, loaded.trainer, state))
    with pytest.raises(CheckpointError, match="the target the run began with"):
        train(replace(config, resume=True), quiet_log())
    assert parts.target.fingerprint == loaded.state["target"]
