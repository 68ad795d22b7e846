"""Checkpoints: whole or absent, verified when read, earlier ones never touched by a failure."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from dflash import checkpoint
from dflash.checkpoint import Checkpoint
from dflash.errors import CheckpointError, OutputError


def example(step: int) -> Checkpoint:
    weights = {"fc.weight": torch.full((64, 32), float(step)), "norm.weight": torch.ones(32)}
    return Checkpoint(weights, {"rng": torch.Generator().manual_seed(step).get_state()}, {"position": [1, step]})


def same(a: Checkpoint, b: Checkpoint) -> bool:
    tensors = [(a.weights, b.weights), (a.trainer, b.trainer)]
    tensors_equal = (x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in tensors)
    return a.state == b.state and all(tensors_equal)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = example(3)
    path = checkpoint.save(tmp_path, 3, saved)
    assert same(checkpoint.load(path), saved)
    assert not same(checkpoint.load(path), example(4))
    assert checkpoint.newest(tmp_path) == path


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, example(1))
    checkpoint.save(tmp_path, 3, example(2))
    assert same(checkpoint.load(checkpoint.step_directory(tmp_path, 3)), example(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        checkpoint.save(tmp_path, step, example(step))
    checkpoint.prune(tmp_path, keep=2, best_step=2)
    assert checkpoint.saved_steps(tmp_path) == [2, 5, 6]
    checkpoint.prune(tmp_path, keep=10, best_step=None)
    assert checkpoint.saved_steps(tmp_path) == [2, 5, 6]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.TRAINER, checkpoint.STATE])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "empty"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint.save(tmp_path, 3, example(3)) / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "changed":
        flip_a_byte(path)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=name) as caught:
        checkpoint.load(path.parent)
    assert "delete step-00000003" in str(caught.value)


def test_a_state_edited_by_hand_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, example(3)) / checkpoint.STATE
    body = json.loads(path.read_text())
    body["state"]["position"] = [9, 9]
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="other contents"):
        checkpoint.load(path.parent)


@pytest.mark.parametrize("text", ["[]", "null", "3", "[" * 100000, '{"seal": 1}', ""])
def test_a_state_of_another_shape_is_a_broken_checkpoint(text: str, tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path, 1, example(1))
    (directory / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="delete step-00000001"):
        checkpoint.load(directory)


def test_a_sealed_state_without_the_files_it_needs_is_a_broken_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint.save(tmp_path, 1, example(1))
    body = json.loads((directory / "state.json").read_text())
    del body["seal"], body["sha256"]["trainer.safetensors"]
    (directory / "state.json").write_text(checkpoint._sealed(body))
    with pytest.raises(CheckpointError, match="without what a run needs"):
        checkpoint.load(directory)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint, got none"):
        checkpoint.newest(tmp_path)


def test_a_full_disk_is_one_error_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    earlier = checkpoint.save(tmp_path, 1, example(1))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # the weights are 8 KiB
        with pytest.raises(OutputError, match="no space left"):
            checkpoint.save(tmp_path, 2, example(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]
    assert same(checkpoint.load(earlier), example(1))
    checkpoint.save(tmp_path, 2, example(2))  # the control: with room it works


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_no_space_at_any_call_is_reported_as_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OutputError, match="no space left"):
        checkpoint.save(tmp_path, 2, example(2))
    assert list(tmp_path.iterdir()) == []


# one child a kill point, forked from one process: killed at the n-th file-system call of its second save
KILLED_IN_SAVE = textwrap.dedent("""
    import os, shutil, signal, sys
    from pathlib import Path
    from dflash import checkpoint
    from tests.test_checkpoint import example
    calls = 0
    def deadly_call(original, deadly):
        def call(*arguments, **options):
            global calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)
        return call
    def save_twice(root, deadly):
        checkpoint.save(root, 1, example(1))
        os.fsync, os.rename = deadly_call(os.fsync, deadly), deadly_call(os.rename, deadly)
        checkpoint.save_file = deadly_call(checkpoint.save_file, deadly)
        shutil.rmtree = deadly_call(shutil.rmtree, deadly)
        checkpoint.save(root, 2, example(2))
        checkpoint.prune(root, keep=1, best_step=None)
    for deadly in range(1, 1000):
        pid = os.fork()
        if pid == 0:
            save_twice(Path(sys.argv[1]) / str(deadly), deadly)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        print(deadly, os.WTERMSIG(status), flush=True)
        if status == 0:
            break
""")


def test_a_kill_at_any_call_of_a_save_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_IN_SAVE, str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1])
    signals = [int(line.split()[1]) for line in child.stdout.splitlines()]
    assert set(signals[:-1]) == {signal.SIGKILL}, child.stderr
    assert len(signals) >= 9
    assert signals[-1] == 0  # the control: the last child ran past every call and was not killed
    left_a_partial = 0
    for deadly in range(1, len(signals) + 1):
        left_a_partial += check_after_kill(tmp_path / str(deadly))
    assert left_a_partial >= 4  # the control: kills did hit the middle of a save


def check_after_kill(root: Path) -> bool:
    """Every checkpoint that is there is whole and the next save clears up; true when there was something to clear."""
    partial = any(path.name.startswith(checkpoint.PARTIAL) for path in root.iterdir())
    steps = checkpoint.saved_steps(root)
    assert steps in ([1], [1, 2], [2])
    for step in steps:
        assert same(checkpoint.load(checkpoint.step_directory(root, step)), example(step))
    checkpoint.save(root, 3, example(3))
    assert not any(path.name.startswith(checkpoint.PARTIAL) for path in root.iterdir())
    return partial
