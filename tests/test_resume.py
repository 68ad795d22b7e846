"""Stops, kills and resumes: the curve of a run that was interrupted is that of one that was not, bit for bit."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash import checkpoint, progress
from dflash.errors import CheckpointError, OutputError, Stopped
from dflash.metrics_file import read
from dflash.parts import build
from dflash.progress import Progress
from dflash.step import Stepper
from dflash.train import Training, train
from tests.training import curve, quiet_log, same_weights, small_config, unchanged


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
    assert f"stopped by {number.name} at step 5 of 8" in str(stopped.value)
    assert f"dflash train --resume --output {parted.output}" in str(stopped.value)
    assert checkpoint.saved_steps(parted.output / "checkpoints")[-1] == 5
    train(replace(parted, resume=True), quiet_log())
    assert curve(parted.output) == curve(whole.output)
    assert same_weights(parted, whole)


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
    with pytest.raises(Stopped, match=r"SIGTERM after the last step \(8 of 8\): .* the final measurement is pending"):
        train(config, quiet_log())
    assert read(config.output / "metrics.jsonl", "eval") == []
    monkeypatch.undo()
    assert train(replace(config, resume=True), quiet_log()) == 0
    assert [record["step"] for record in read(config.output / "metrics.jsonl", "eval")] == [8]


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
    parts = build(config)
    path = checkpoint.newest(config.output / "checkpoints")
    loaded = checkpoint.load(path)
    state = {**loaded.state, "target": "another"}
    checkpoint.save(path.parent, 1, checkpoint.Checkpoint(loaded.weights, loaded.trainer, state))
    with pytest.raises(CheckpointError, match="the target the run began with"):
        train(replace(config, resume=True), quiet_log())
    assert parts.target.fingerprint == loaded.state["target"]


def reseal(directory: Path, **files: dict[str, Tensor] | None) -> None:
    """Writes `files` into a checkpoint and makes its checksums right again: damage that no checksum finds."""
    body = json.loads((directory / "state.json").read_text())
    del body["seal"]
    for stem, tensors in files.items():
        if tensors is not None:
            save_file(tensors, directory / f"{stem}.safetensors")
            body["sha256"][f"{stem}.safetensors"] = checkpoint._sha256(directory / f"{stem}.safetensors")
    (directory / "state.json").write_text(checkpoint._sealed(body))


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("stem", "change", "fragment"),
    [
        ("drafter", lambda t: {k: v.to(torch.int64) for k, v in t.items()}, "got torch.int64"),
        ("drafter", lambda t: {k: v.bfloat16() for k, v in t.items()}, "got torch.bfloat16"),
        ("drafter", lambda t: {k: v * math.nan for k, v in t.items()}, "got NaN or infinity"),
        ("drafter", lambda t: {}, "got none"),
        ("trainer", lambda t: {}, "a state of the random numbers"),
        ("trainer", lambda t: {k: v[:9] if k == "rng/cpu" else v for k, v in t.items()}, "random numbers"),
        ("trainer", lambda t: {k: v.double() if "exp_avg" in k else v for k, v in t.items()}, "torch.float64"),
    ],
)
def test_a_checkpoint_of_other_numbers_is_refused_and_the_run_left_as_it_is(
    stem: str, change: Change, fragment: str, tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = small_config(tmp_path, tiny_target_dir, steps=2, save_every=0)
    train(config, quiet_log())
    directory = checkpoint.newest(config.output / "checkpoints")
    good = load_file(directory / f"{stem}.safetensors")
    reseal(directory, **{stem: change(good)})
    with unchanged(tmp_path), pytest.raises(CheckpointError, match=re.escape(fragment)):
        train(replace(config, resume=True), quiet_log())
    reseal(directory, **{stem: good})
    train(replace(config, resume=True), quiet_log())  # the control: the same file put back


def test_counters_edited_by_hand_are_refused(tmp_path: Path) -> None:
    good = asdict(Progress(step=3, best_tau=1.5))
    assert progress._progress(good, "x") == Progress(step=3, best_tau=1.5)
    for wrong in ({"step": "3"}, {"step": -1}, {"step": None}, {"epoch": 1.5}, {"zz": 1}, {"best_step": True}):
        with pytest.raises(CheckpointError, match="delete this checkpoint"):
            progress._progress({**good, **wrong}, "x")
    for nothing in (None, [], {}):
        with pytest.raises(CheckpointError, match="the counters of a run"):
            progress._progress(nothing, "x")


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'[1]\n{}\nnull\n\xff\x00\n{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert read(file) == [{"kind": "step", "step": 1}]
