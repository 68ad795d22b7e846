"""`python -m repro.gpu_column`: the faults that need a GPU, each trial in a child; a table last, JSON in $OUT."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from repro.child import Outcome, run_child
from repro.measure import SHOWS_AS
from repro.rates import Rate

LIMIT_S = 90.0
AT_ONCE = 4  # children share the GPU but no state; more would make compiles slower than the limit


@dataclass(frozen=True)
class Row:
    """One line of the column: a body's command line and how often to run it."""

    name: str
    arguments: tuple[str, ...]
    trials: int


ROWS: tuple[Row, ...] = (
    Row("DEADLOCK, no lock", ("-m", "repro.bodies.deadlock", "unlocked"), 3),
    Row("DEADLOCK, lock round forward", ("-m", "repro.bodies.deadlock", "forward"), 2),
    Row("DEADLOCK, lock round forward and backward", ("-m", "repro.bodies.deadlock", "full"), 3),
    Row("DEADLOCK, force flag", ("-m", "repro.bodies.deadlock", "force"), 2),
    Row("FLEXCOLD", ("-m", "repro.run", "flex_cold"), 2),
    Row("CASE, three threads on one GPU", ("-m", "repro.run", "case"), 2),
)


def main() -> int:
    """Runs every row; exit code 2 without a CUDA device."""
    if not torch.cuda.is_available():
        print("repro.gpu_column: expected a CUDA device, got none; run it on a GPU machine", file=sys.stderr)
        return 2
    started = time.monotonic()
    # row by row interleaved: if the time runs out, each row has had a trial
    jobs = [(row, trial) for trial in range(max(row.trials for row in ROWS)) for row in ROWS if trial < row.trials]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda job: (job[0], _trial(*job)), jobs))
    device = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    _write(device, results)
    print(f"\n{device}, {time.monotonic() - started:.0f} s\n{'fault':44} shown (Wilson 95 %)    verdicts")
    for row in ROWS:
        verdicts = [outcome.verdict for owner, outcome in results if owner is row]
        ran = [verdict for verdict in verdicts if verdict not in ("skipped", "broken")]
        rate = Rate(sum(verdict in SHOWS_AS for verdict in ran), len(ran))
        print(f"{row.name:44} {rate!s:22} {', '.join(verdicts)}")
    return 0


def _trial(row: Row, trial: int) -> Outcome:
    outcome = run_child(row.arguments, LIMIT_S, {"TORCHINDUCTOR_COMPILE_THREADS": "4"})
    print(f"{row.name} #{trial + 1}: {outcome.verdict} in {outcome.seconds:.0f} s: {outcome.line[:150]}", flush=True)
    return outcome


def _write(device: str, results: list[tuple[Row, Outcome]]) -> None:
    folder = Path(os.environ.get("OUT", "."))
    rows = [{"fault": row.name, "device": device, **outcome.as_json()} for row, outcome in results]
    for entry in rows:
        entry["output"] = str(entry["output"])[-20_000:]
    (folder / "gpu_column.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
