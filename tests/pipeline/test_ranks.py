"""Several processes under torchrun: one curve, one writer, one checkpoint for any number of ranks; nobody hangs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash import checkpoint
from dflash.config import TrainConfig
from dflash.errors import ConfigError
from dflash.metrics_file import read
from dflash.train import train
from tests.training import curve, quiet_log, small_config, write_chats

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


def options(config: TrainConfig, *more: str) -> list[str]:
    """The small configuration as a command line."""
    return [
        f"--output={config.output}", f"--steps={config.steps}", "--device=cpu", f"--save-every={config.save_every}",
        f"--target.path={config.target.path}", "--drafter.layers=1", "--drafter.block-size=4",
        "--drafter.max-anchors=8", "--drafter.init=random", f"--data.train={config.data.train}",
        f"--data.heldout={config.data.heldout}", "--data.row-tokens=128", "--optim.lr=2e-3", "--eval.every=0",
        "--eval.prompts=1", "--eval.max-new-tokens=8", "--optim.accumulate=2", *more,
    ]  # fmt: skip


@contextmanager
def ranks(count: int, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`torchrun --nproc-per-node count -m dflash train ...`; ended on exit, with all its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [*command, "-m", "dflash", "train", *words],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(count: int, words: list[str]) -> tuple[int, str]:
    with ranks(count, words) as process:
        text, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, text


def accumulating(tmp_path: Path, target: Path, **changes: object) -> TrainConfig:
    config = small_config(tmp_path, target, **changes)
    return replace(config, optim=replace(config.optim, accumulate=2))


def test_two_ranks_give_the_curve_of_one_process_though_one_has_nothing_to_train_on_at_times(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    with (tmp_path / "chats.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"prompt": f"Say {i}", "completion": "7"}) + "\n" for i in range(4))
    alone = accumulating(tmp_path, tiny_target_dir)
    alone = replace(alone, data=replace(alone.data, pack=False))
    train(alone, quiet_log())
    both = replace(alone, output=tmp_path / "both")
    code, text = run(2, options(both, "--data.no-pack"))
    assert code == 0, text
    # a sum of two has no order: the bits are those of one process
    assert curve(both.output) == curve(alone.output)
    assert text.count("held-out result") == 1, "one rank writes"
    state = checkpoint.read_state(checkpoint.newest(both.output / "checkpoints"))["state"]["progress"]
    assert state["empty_batches"] == 8, "or no rank was ever without"
    # back to step 6, and on with another number of processes
    shutil.rmtree(checkpoint.newest(both.output / "checkpoints"))
    train(replace(both, resume=True), quiet_log())
    assert curve(both.output) == curve(alone.output)


def test_a_drafter_split_over_two_ranks_trains_as_a_whole_one_and_its_checkpoint_is_whole(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    with (tmp_path / "chats.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"prompt": f"Say {i}", "completion": "7"}) + "\n" for i in range(4))
    alone = accumulating(tmp_path, tiny_target_dir)
    alone = replace(alone, data=replace(alone.data, pack=False))
    train(alone, quiet_log())
    split = replace(alone, output=tmp_path / "split")
    code, text = run(2, options(split, "--data.no-pack", "--shard"))
    assert code == 0, text
    losses = [[record["loss"] for record in read(c.output / "metrics.jsonl", "step")] for c in (alone, split)]
    assert len(losses[0]) > 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    saved = [checkpoint.load(checkpoint.newest(c.output / "checkpoints")) for c in (alone, split)]
    for name, weight in saved[0].weights.items():
        torch.testing.assert_close(saved[1].weights[name], weight, rtol=1e-3, atol=1e-4)
    assert saved[0].trainer.keys() == saved[1].trainer.keys()
    # and on from step 6 in one process that splits nothing
    shutil.rmtree(checkpoint.newest(split.output / "checkpoints"))
    train(replace(split, resume=True), quiet_log())
    again = [record["loss"] for record in read(split.output / "metrics.jsonl", "step")]
    assert again == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({}, "expected several processes"), ({"drafters": "cpu,cpu", "targets": "cpu"}, "expected several processes")],
)
def test_splitting_alone_is_refused(
    tmp_path: Path, tiny_target_dir: Path, changes: dict[str, str], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"--shard: {remedy}"):
        train(accumulating(tmp_path, tiny_target_dir, shard=True, **changes), quiet_log())
    assert not (tmp_path / "run").exists()


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def wait_for(config: TrainConfig, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        metrics = config.output / "metrics.jsonl"
        if metrics.exists() and any(record["step"] >= step for record in read(metrics, "step")):
            return
        time.sleep(0.05)
    raise AssertionError("the run did not come so far")


def test_the_kill_of_one_rank_ends_all_and_the_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = accumulating(tmp_path, tiny_target_dir, steps=60, save_every=10)
    with ranks(2, options(config)) as process:
        wait_for(config, 11)
        workers = children(process.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        killed = time.monotonic()
        process.communicate(timeout=30)
        assert time.monotonic() - killed < 30
        assert process.returncode != 0
    assert 10 <= checkpoint.saved_steps(config.output / "checkpoints")[-1] < 60
    whole = replace(config, output=tmp_path / "whole", save_every=0)
    train(whole, quiet_log())
    train(replace(config, resume=True), quiet_log())
    assert curve(config.output) == curve(whole.output)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = accumulating(tmp_path, tiny_target_dir, steps=600, save_every=0)
    with ranks(2, options(config)) as process:
        wait_for(config, 3)
        os.kill(children(process.pid)[1], signal.SIGTERM)
        text, _ = process.communicate(timeout=30)
    steps = set(re.findall(r"stopped by .*?at step (\d+)", text))
    assert len(steps) == 1, text
    assert checkpoint.saved_steps(config.output / "checkpoints") == [int(steps.pop())]
