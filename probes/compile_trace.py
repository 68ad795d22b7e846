"""What each thread traced, compiled, waited for and called, on one time line: a Perfetto trace and the overlaps.

python -m probes.compile_trace -o trace.json -- train.py      then open trace.json in ui.perfetto.dev
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from probes.call_recorder import Event, ThreadState, recording
from probes.chrome_trace import kind_of, write_trace
from probes.command_line import (
    CLEAN,
    FINDING,
    UsageProblem,
    console,
    print_json,
    probe_parser,
    run_command,
    split_target,
    table,
)
from probes.run_target import Outcome, find_target, program, run, show_failure
from probes.traced_state import StateChange, StateWatch

# What a thread may be inside when another thread's call or trace falls into it and is at risk.
_OUTER = frozenset({"FX trace", "dynamo", "lazy backward", "mask annotation"})
_INNER = frozenset({"FX trace", "dynamo", "lazy backward", "cold call", "warm call"})
# compile_lock keeps these apart, and a call on its own is no writer
_HARMLESS = frozenset({("dynamo", "dynamo"), ("dynamo", "cold call"), ("dynamo", "warm call"),
                       ("lazy backward", "warm call"), ("mask annotation", "warm call")})  # fmt: skip
INTERVALS_KEPT = 200_000


@dataclass(frozen=True)
class Overlap:
    """Intervals of one thread that contain the start of another thread's. Times in ms since the recording began."""

    outer_thread: str
    outer: str
    outer_ms: tuple[float, float]
    inner_thread: str
    inner: str
    inner_ms: float
    count: int

    @property
    def at_risk(self) -> bool:
        """Whether the two write or read the same process-wide state without a lock between them."""
        return (self.outer, self.inner) not in _HARMLESS

    def __str__(self) -> str:
        first, last = self.outer_ms
        again = f" ({self.count} times; the first is shown)" if self.count > 1 else ""
        return (
            f"{self.outer_thread}'s {self.outer} [{first:.1f}, {last:.1f}] ms contains "
            f"{self.inner_thread}'s {self.inner} at {self.inner_ms:.1f} ms{again}"
        )


@dataclass(frozen=True)
class TraceResult:
    """What the time line shows. `intervals` counts what was kept, `dropped` the warm calls beyond the limit."""

    intervals: int
    dropped: int
    threads: tuple[str, ...]
    totals_ms: tuple[tuple[str, str, int, float], ...]  # thread, kind, count, total
    overlaps: tuple[Overlap, ...]
    state_changes: tuple[StateChange, ...]

    @property
    def finding(self) -> bool:
        """True when some overlap is at risk."""
        return any(overlap.at_risk for overlap in self.overlaps)


class Tracing:
    """Collects events from all threads; `result` and `write` may be used during and after the block."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self._events: list[Event] = []
        self._dropped = 0
        self._state = StateWatch(start_ns)

    def take(self, event: Event) -> None:
        """The recorder's sink."""
        self._state.sample(event)
        if kind_of(event) is not None:
            self._events.append(event)  # atomic, as all threads come here

    def warm(self, name: str, state: ThreadState, start_ns: int, end_ns: int) -> None:
        """Keep a warm call, up to the limit."""
        if len(self._events) < INTERVALS_KEPT:
            self._events.append(Event("call", name, state.ident, state.tid, state.thread, start_ns, end_ns))
        else:
            self._dropped += 1

    def write(self, path: Path) -> None:
        """Write the Chrome trace-event JSON that Perfetto reads."""
        events = list(self._events)
        write_trace(path, events, self.start_ns)

    @property
    def result(self) -> TraceResult:
        """The summary."""
        events = sorted(list(self._events), key=lambda event: event.start_ns)
        return TraceResult(
            intervals=len(events),
            dropped=self._dropped,
            threads=tuple(sorted({f"{e.thread} ({e.tid})" for e in events})),
            totals_ms=_totals(events),
            overlaps=_overlaps(events, self.start_ns),
            state_changes=self._state.changes(),
        )


def _totals(events: Sequence[Event]) -> tuple[tuple[str, str, int, float], ...]:
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for event in events:
        key = (event.thread, kind_of(event) or "")
        count, total = sums.get(key, (0, 0.0))
        sums[key] = (count + 1, total + (event.end_ns - event.start_ns) / 1e6)
    return tuple((thread, kind, count, round(total, 3)) for (thread, kind), (count, total) in sorted(sums.items()))


def _overlaps(events: Sequence[Event], start_ns: int) -> tuple[Overlap, ...]:
    """Overlaps between threads, one row for each pair of threads and kinds; `events` sorted by start."""
    found: dict[tuple[str, str, str, str], Overlap] = {}
    open_outers: list[Event] = []
    for event in events:
        open_outers = [outer for outer in open_outers if outer.end_ns > event.start_ns]
        kind = kind_of(event) or ""
        for outer in open_outers if kind in _INNER else ():
            if outer.ident != event.ident:
                _count(found, outer, event, start_ns)
        if kind in _OUTER:
            open_outers.append(event)
    return tuple(found.values())


def _count(found: dict[tuple[str, str, str, str], Overlap], outer: Event, inner: Event, start_ns: int) -> None:
    outer_kind, inner_kind = kind_of(outer) or "", kind_of(inner) or ""
    key = (outer.thread, outer_kind, inner.thread, inner_kind)
    earlier = found.get(key)
    interval = ((outer.start_ns - start_ns) / 1e6, (outer.end_ns - start_ns) / 1e6)
    at_ms = (inner.start_ns - start_ns) / 1e6
    if earlier is not None:
        interval, at_ms = earlier.outer_ms, earlier.inner_ms
    count = earlier.count + 1 if earlier else 1
    found[key] = Overlap(outer.thread, outer_kind, interval, inner.thread, inner_kind, at_ms, count)


@contextmanager
def trace() -> Iterator[Tracing]:
    """Record the block, for the whole process; RuntimeError when a recording is in progress; hooks always removed."""
    tracing = Tracing(time.perf_counter_ns())
    with recording(tracing):
        yield tracing


def render(result: TraceResult) -> None:
    """Print the summary as text."""
    out = console()
    title = f"{result.intervals} intervals in {len(result.threads)} threads"
    rows = table(title, "thread", "kind", "count", "total ms")
    for thread, kind, count, total in result.totals_ms:
        rows.add_row(thread, kind, str(count), f"{total:.1f}")
    out.print(rows)
    for overlap in result.overlaps:
        out.print(f"{'at risk' if overlap.at_risk else 'harmless'}: {overlap}", soft_wrap=True)
    for change in result.state_changes:
        out.print(f"written: {change}", soft_wrap=True)
    if result.dropped:
        out.print(
            f"{result.dropped} warm calls after the first {INTERVALS_KEPT} intervals were not kept", soft_wrap=True
        )
    out.print("finding: threads overlap at risk" if result.finding else "clean: no overlap at risk")


def main(argv: Sequence[str]) -> int:
    """Command line; returns 0 clean, 1 when threads overlap in ways that are at risk."""
    words, target_words = split_target(argv)
    parser = probe_parser(
        "compile_trace", (__doc__ or "").split("\n", 1)[0], "python -m probes.compile_trace -o trace.json -- train.py"
    )
    parser.add_argument("-o", "--output", type=Path, help="write a Perfetto/Chrome trace here")
    options = parser.parse_args(words)
    target = find_target(target_words)
    _check_output(options.output)
    output = options.output.resolve() if options.output is not None else None  # the program may change the folder
    with trace() as tracing, program(target, lambda left: _reported(tracing, left, output, as_json=options.json)):
        outcome = run(target)
    return _reported(tracing, outcome, output, as_json=options.json)


def _check_output(output: Path | None) -> None:
    """UsageProblem now rather than a lost trace after a long program."""
    if output is None:
        return
    folder = output.resolve().parent
    if not folder.is_dir():
        raise UsageProblem(f"expected a folder to write to, {output.parent} does not exist: make it first")
    if output.is_dir():
        raise UsageProblem(f"expected a file to write to, {output} is a folder: name a file in it")
    if not os.access(output if output.exists() else folder, os.W_OK):
        raise UsageProblem(f"expected a file that can be written, {output} cannot: choose another place")


def _reported(tracing: Tracing, outcome: Outcome, output: Path | None, *, as_json: bool) -> int:
    result = tracing.result
    if output is not None:
        tracing.write(output)
    if as_json:
        print_json(result, after_program=True)
    else:
        render(result)
        show_failure(outcome)
    return FINDING if result.finding or outcome.failed else CLEAN


if __name__ == "__main__":
    run_command(main)
