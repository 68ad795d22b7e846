"""The FX flag's diagnostic: was a compiled call refused because FX was tracing, and whose trace was it?

`python -m probes.fx_state [--watch module:function ...] -- script.py args`; without a program it runs the embedded
drafter (`probes.case_target`). Three layers of evidence: the state before anything is imported or built; every entry
and exit of the watched functions and every check that a compiled call makes, in every thread, through the public
helpers; the raw private state with its writers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console

from probes import torch_internals as ti
from probes.command_line import CLEAN, FINDING, console, print_json, probe_parser, run_command, split_target, table
from probes.control_run import ControlRun, compare_with_bare_run
from probes.fx_recorder import FxRecorder, Reading, Verdict, Writing
from probes.run_target import (
    FoundFunction,
    Outcome,
    Target,
    find_function,
    find_target,
    program,
    run,
    show_failure,
)

CASE_TARGET = Target("probes.case_target", is_module=True)
CASE_WATCH = ("dflash.drafter.model:flex_attention_forward",)
SHOWN = 12


@dataclass(frozen=True)
class Overlap:
    """Two threads named: the reader saw the flag at `read_s` inside the writer's scope (seconds since the watch)."""

    reader: str
    where: str
    read_s: float
    writer: str
    by: str
    began_s: float
    ended_s: float | None

    def __str__(self) -> str:
        end = "still running" if self.ended_s is None else f"{self.ended_s:.3f} s"
        return (
            f"{self.reader} read the flag at {self.read_s:.3f} s in {self.where}, "
            f"inside {self.by} of {self.writer} [{self.began_s:.3f} s, {end}]"
        )


@dataclass(frozen=True)
class FxStateReport:
    """What was found. `baseline` is empty when nothing was wrong before; `leftover` what stayed wrong at the end."""

    torch_version: str
    flag: str
    flag_scope: str
    check: str
    baseline: tuple[ti.Difference, ...]
    leftover: tuple[ti.Difference, ...]
    verdict: Verdict
    readings_by_verdict: dict[str, int]
    readings_by_place: tuple[tuple[str, str, str, int], ...]  # where, thread, verdict, count
    overlaps: tuple[Overlap, ...]
    readings: tuple[Reading, ...]
    writings: tuple[Writing, ...]
    writings_seen: int
    outcome: Outcome | None = None
    control: ControlRun | None = None

    @property
    def found_something(self) -> bool:
        control_differs = self.control is not None and not self.control.same
        return self.verdict is not Verdict.NEVER or bool(self.baseline) or bool(self.leftover) or control_differs


class FxWatch:
    """What `watch_fx_state` yields: `report()` may be asked for inside the block or after it."""

    def __init__(self, recorder: FxRecorder, baseline: ti.Snapshot) -> None:
        self.recorder = recorder
        self._baseline = baseline

    def report(self, outcome: Outcome | None = None, control: ControlRun | None = None) -> FxStateReport:
        readings = self.recorder.readings()
        counts = self.recorder.counts
        seen = [verdict for verdict in Verdict if any(key[2] == verdict.value for key in counts)]
        by_verdict: Counter[str] = Counter()
        for (_, _, verdict), count in counts.items():
            by_verdict[verdict] += count
        return FxStateReport(
            torch_version=torch.__version__,
            flag=ti.fx_flag_name(),
            flag_scope="one per thread" if ti.fx_flag_is_per_thread() else "one for all threads of the process",
            check=str(ti.compile_wrapper_check()),
            baseline=ti.not_at_rest(self._baseline),
            leftover=ti.not_at_rest(ti.snapshot()),
            verdict=max(seen, key=lambda verdict: verdict.rank, default=Verdict.NEVER),
            readings_by_verdict=dict(by_verdict),
            readings_by_place=tuple((*key, count) for key, count in sorted(counts.items())),
            overlaps=tuple(_overlaps(readings)),
            readings=readings,
            writings=self.recorder.writings(),
            writings_seen=self.recorder.scopes_seen,
            outcome=outcome,
            control=control,
        )


@contextmanager
def watch_fx_state(functions: Sequence[FoundFunction] = ()) -> Iterator[FxWatch]:
    """Watch the FX flag of the whole process in a block; torch is as before afterwards, also after an exception.

    Entered while another watch is entered: RuntimeError.
    """
    baseline = ti.snapshot()
    with FxRecorder(functions) as recorder:
        yield FxWatch(recorder, baseline)


def _overlaps(readings: Sequence[Reading]) -> Iterator[Overlap]:
    for reading in readings:
        writer = reading.writer
        if writer is None or reading.verdict not in (Verdict.OTHER_THREAD, Verdict.PATCHED, Verdict.LEFT_ON):
            continue
        yield Overlap(
            reader=str(reading.thread),
            where=f"{reading.where} ({reading.event})",
            read_s=reading.at_s,
            writer=str(writer.thread),
            by=writer.by,
            began_s=writer.began_s,
            ended_s=writer.ended_s,
        )


def show(report: FxStateReport, out: Console) -> None:
    """Print the report as tables and sentences."""
    out.print(f"torch {report.torch_version}: {report.flag}, {report.flag_scope}")
    out.print(f"the check is made at {report.check}", soft_wrap=True)
    out.print("before anything was imported: " + ("; ".join(map(str, report.baseline)) or "at rest"))
    rows = table("", "where", "thread", "readings", "flag")
    for where, thread, verdict, count in report.readings_by_place:
        rows.add_row(where, thread, str(count), verdict)
    out.print(rows)
    out.print(f"scopes that wrote the flag or FX metadata: {_writers_in_words(report.writings)}", soft_wrap=True)
    for overlap in report.overlaps[:SHOWN]:
        out.print(f"  {overlap}", soft_wrap=True)
    if len(report.overlaps) > SHOWN:
        out.print(f"  and {len(report.overlaps) - SHOWN} more (see --json)")
    _show_guilty_stack(report, out)
    out.print("after the program: " + ("; ".join(map(str, report.leftover)) or "at rest"), soft_wrap=True)
    if report.control is not None:
        out.print(str(report.control), soft_wrap=True)
    if report.outcome is not None:
        show_failure(report.outcome)
    out.print(f"verdict: {report.verdict.value}", style="bold")


def _writers_in_words(writings: Sequence[Writing]) -> str:
    counts = Counter((writing.by, writing.thread.name) for writing in writings)
    return ", ".join(f"{count} of {by} in {thread}" for (by, thread), count in counts.most_common(SHOWN)) or "none"


def _show_guilty_stack(report: FxStateReport, out: Console) -> None:
    guilty = max(report.readings, key=lambda reading: reading.verdict.rank, default=None)
    if guilty is None or guilty.writer is None:
        return
    out.print(f"written by {guilty.writer.by} in {guilty.writer.thread}, called from:")
    for line in guilty.writer.stack:
        out.print(f"    {line}", soft_wrap=True)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = probe_parser(
        "fx_state",
        "Find out whether a compiled call met an active FX trace, whose it was, and where torch checks. "
        "Without a program: the embedded drafter's configuration, construction, forward and backward.",
        "python -m probes.fx_state --watch mypackage.model:attention -- train.py --steps 10",
    )
    parser.add_argument(
        "--watch",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="read the state at its entries and exits",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="also run the program in two child processes, bare and watched, and compare",
    )
    own, words = split_target(argv)
    options = parser.parse_args(own)
    target = CASE_TARGET if words is None else find_target(words)
    watch = options.watch or (CASE_WATCH if target.name == CASE_TARGET.name else ())
    baseline = ti.snapshot()
    with program(target):
        recorder = FxRecorder([find_function(spec) for spec in watch])

    def report(outcome: Outcome) -> int:
        control = compare_with_bare_run(target, "fx_state", watch) if options.control else None
        found = FxWatch(recorder, baseline).report(outcome, control)
        if options.json:
            print_json(found, after_program=True)
        else:
            show(found, console())
        return FINDING if found.found_something or outcome.failed else CLEAN

    with program(target, report), recorder:
        outcome = run(target)
    return report(outcome)


if __name__ == "__main__":
    run_command(main)
