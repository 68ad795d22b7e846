"""Run directories as the trainer leaves them, made in no time."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash import run_directory
from dflash.config import PRESETS, TrainConfig
from dflash.run_directory import RunDirectory

FINAL = {
    "step": 40, "tau": 2.5, "conditional_acceptance": [0.8, 0.5, 0.2], "speedup": 1.4, "identical": 48, "prompts": 48,
}  # fmt: skip


def step_record(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "kind": "step", "step": step, "epoch": 0, "loss": 5 * math.exp(-step / 50), "accuracy": 0.3, "tau": 1.5,
        "learning_rate": 1e-3, "grad_norm": 2.0, "anchors": 64, "tokens": 480, "step_ms": 120.0 + step % 7,
        "tok_s": 4000.0,
    }  # fmt: skip


def make_run(
    path: Path, *, steps: int = 60, evaluations: tuple[int, ...] = (20, 40), config: TrainConfig | None = None
) -> Path:
    """A run that logged `steps` steps and was then interrupted."""
    run = RunDirectory(path)
    run_directory.create(run, replace(config or PRESETS["tiny"], output=path, steps=400))
    records = [step_record(step) for step in range(1, steps + 1)]
    records += [
        {"kind": "eval", "step": step, "tau": 1 + step / 40, "conditional_acceptance": [0.7, 0.4, 0.1], "best": True}
        for step in evaluations
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def finish(path: Path) -> None:
    """The closing evaluation."""
    RunDirectory(path).evaluation.write_text(json.dumps(FINAL), encoding="utf-8")


def add_trace(path: Path, name: str = "trace.json") -> Path:
    """What `python -m probes.compile_trace -o` writes: two threads, a stage inside a stage."""
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": f"drafter-{tid}"}} for tid in (7, 8)
    ]
    stages = [
        {"ph": "X", "name": f"{cat}: f", "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        for tid in (7, 8)
        for cat, ts, dur in (("dynamo", 1000, 9000), ("AOT", 2000, 5000), ("warm call", 20000, 10))
    ]
    file = path / name
    file.write_text(json.dumps({"traceEvents": [*named, *stages]}), encoding="utf-8")
    return file
