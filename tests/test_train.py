"""The training loop: one divisor for the whole batch, the schedule, skipped steps, modes and strategies."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash import checkpoint
from dflash.attention.select import STRATEGIES
from dflash.config import OptimOptions, TrainConfig
from dflash.data.rows import batches
from dflash.drafter import objectives
from dflash.drafter.objectives import CrossEntropy, Targets
from dflash.errors import Diverged
from dflash.features import FeatureSource
from dflash.metrics_file import read
from dflash.parts import build
from dflash.step import Stepper
from dflash.train import train
from tests.training import curve, newest_weights, printed, quiet_log, same_weights, small_config, write_chats


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


def test_another_seed_gives_another_curve(tmp_path: Path, tiny_target_dir: Path) -> None:
    first = small_config(tmp_path, tiny_target_dir, steps=2)
    second = replace(first, seed=1, output=tmp_path / "second")
    train(first, quiet_log())
    train(second, quiet_log())
    assert curve(first.output) != curve(second.output)


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
    monkeypatch.setattr("dflash.parts.check_blocks", lambda store, block_size: None)  # it would say so before
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
    with pytest.raises(Diverged, match=r"step 6: .* 3 times in a row: .*; lower --optim\.lr"):
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


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
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
