"""Small real trainings for the tests: a random target, a few conversations, seconds a run."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from dflash import checkpoint
from dflash.config import DataOptions, DrafterOptions, EvalOptions, OptimOptions, TargetOptions, TrainConfig
from dflash.log import RunLog
from dflash.metrics_file import read


def write_chats(path: Path, count: int = 24, words: int = 12) -> Path:
    """Conversations with answers of about 3 * `words` tokens."""
    rows = []
    for i in range(count):
        answer = ", ".join(str(i + j) for j in range(words))
        rows.append(json.dumps({"prompt": f"Count from {i}", "completion": answer}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def small_config(tmp_path: Path, target: Path, **changes: object) -> TrainConfig:
    """8 steps of a 1-layer drafter with blocks of 4, one row of 128 tokens a step, no evaluation before the end."""
    data = tmp_path / "chats.jsonl"
    if not data.exists():
        write_chats(data)
    held = write_chats(tmp_path / "held.jsonl", 2)
    config = TrainConfig(
        output=tmp_path / "run",
        steps=8,
        device="cpu",
        save_every=3,
        target=TargetOptions(path=str(target)),
        drafter=DrafterOptions(layers=1, block_size=4, max_anchors=8),
        data=DataOptions(train=str(data), heldout=str(held), row_tokens=128),
        optim=OptimOptions(lr=2e-3),
        eval=EvalOptions(every=0, prompts=1, max_new_tokens=8),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def quiet_log() -> RunLog:
    """Prints into memory."""
    return RunLog(Console(file=io.StringIO(), width=200), plain_interval_s=0.0)


def printed(log: RunLog) -> str:
    """What a quiet log has got."""
    assert isinstance(log.console.file, io.StringIO)
    return log.console.file.getvalue()


def curve(run: Path) -> list[tuple[object, ...]]:
    """Everything of a run's steps that must not depend on when it was stopped: all but the times."""
    timed = {"step_ms", "tok_s"}
    return [tuple(v for k, v in record.items() if k not in timed) for record in read(run / "metrics.jsonl", "step")]


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """Fails when anything under `path` was written meanwhile."""

    def state() -> dict[str, bytes | None]:
        return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}

    before = state()
    yield
    assert state() == before


def newest_weights(config: TrainConfig) -> dict[str, Tensor]:
    """The drafter of a run's newest checkpoint."""
    return checkpoint.load(checkpoint.newest(config.output / "checkpoints")).weights


def same_weights(a: TrainConfig, b: TrainConfig) -> bool:
    """Whether two runs ended with the same bits."""
    x, y = newest_weights(a), newest_weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
