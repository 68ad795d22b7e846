"""What a run has left in its directory so far, read without changing anything; it may still be running."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import run_directory
from dflash.checkpoint import saved_steps
from dflash.errors import CheckpointError
from dflash.metrics_file import read
from dflash.report.scale import Point
from dflash.report.timeline import Interval, find_traces
from dflash.run_directory import RunDirectory

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunData:
    """One run. config, environment: names and values as text; steps, evaluations, skips: records of metrics.jsonl."""

    name: str
    config: dict[str, str]
    environment: dict[str, str]
    steps: Sequence[Record]
    evaluations: Sequence[Record]
    skips: Sequence[Record]
    # the queue between target and drafter threads, and compiles during the run
    flows: Sequence[Record]
    late_compiles: Sequence[Record]
    # the closing evaluation over every held-out prompt; none: the run has not come to its end
    final: Record | None
    checkpoints: Sequence[int]
    traces: Sequence[tuple[str, list[Interval]]]
    # seconds since something was last logged; none: nothing was
    quiet_s: float | None

    @property
    def state(self) -> str:
        """Finished, or how far it came and how long ago."""
        if self.final is not None:
            return "finished"
        if self.quiet_s is None:
            return "nothing logged yet"
        return f"not finished, last line {ago(self.quiet_s)} ago"

    @property
    def total_steps(self) -> int | None:
        """Steps the run was asked to make, where its configuration names a number."""
        steps = self.config.get("steps", "none")
        return int(steps) if steps.isdigit() else None

    def points(self, field: str, records: Sequence[Record] | None = None, scale: float = 1.0) -> list[Point]:
        """(step, value) of a field of the step records, or of others; records without it are passed over."""
        chosen = self.steps if records is None else records
        return [(r["step"], r[field] * scale) for r in chosen if isinstance(r.get(field), (int, float))]

    @property
    def best(self) -> Record | None:
        """The evaluation during training with the highest tau; of equals the later one, as the trainer picks."""
        return max(self.evaluations, key=lambda r: (r["tau"], r["step"]), default=None)


def read_run(path: Path) -> RunData:
    """Reads a run's directory. CheckpointError when it is none."""
    if not run_directory.is_run(path):
        got = "no config.json of a run" if path.is_dir() else "no such directory"
        raise CheckpointError("a run's directory", got, "give the --output of a `dflash train`", where=str(path))
    run = RunDirectory(path)
    saved = json.loads(run.config.read_text(encoding="utf-8"))
    # a kill in the middle of a write leaves a broken last line, which `read` leaves out
    records = read(run.metrics) if run.metrics.exists() else []
    return RunData(
        name=str(path),
        config=flat(saved["config"]),
        environment=flat(saved.get("environment", {})),
        steps=_of_kind(records, "step"),
        evaluations=_of_kind(records, "eval"),
        skips=_of_kind(records, "skip"),
        flows=_of_kind(records, "flow"),
        late_compiles=_of_kind(records, "late_compile"),
        final=_final(run.evaluation),
        checkpoints=saved_steps(run.checkpoints),
        traces=find_traces(path),
        quiet_s=time.time() - run.metrics.stat().st_mtime if records else None,
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested names joined by dots, values as text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = "none" if value is None else str(value)
    return found


def differences(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Names whose values are not the same in all `rows`, in their order."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if len({row.get(name) for row in rows}) > 1]


def ago(seconds: float) -> str:
    """A time span in the one unit that fits."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _final(path: Path) -> Record | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None
