"""Did compiled code really run? Per function and thread: compiled, recompiled, silently uncompiled, degraded.

with compiled_calls.watch() as watching:
    train()
print(watching.result.finding)
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from probes.call_recorder import Event, ThreadState, recording
from probes.command_line import CLEAN, FINDING, console, print_json, probe_parser, run_command, split_target, table
from probes.run_target import Outcome, find_target, program, run, show_failure

# Reasons that say nothing went wrong: there was nothing to compile, or the caller asked for an uncompiled run.
HARMLESS = frozenset({"nothing to compile", "traced on purpose by this thread", "stance set by this thread"})


@dataclass(frozen=True)
class Reason:
    """Why calls did not run compiled, how many, and the other threads to blame where there are any."""

    reason: str
    count: int
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class FunctionReport:
    """One compiled function in one thread. `uncompiled` calls returned a value without compiled code having run."""

    function: str
    thread: str
    calls: int
    ran_compiled: int
    compiles: int
    recompiles: tuple[str, ...]
    uncompiled: tuple[Reason, ...]
    raised: tuple[Reason, ...]


@dataclass(frozen=True)
class DegradedCompile:
    """Generated code that runs ops eagerly. `cause`: threads that annotated meanwhile, or the on-disk cache."""

    thread: str
    ops: tuple[str, ...]
    calls: int
    cause: str


@dataclass(frozen=True)
class Leak:
    """Another thread's compile or export decided something here: a branch on is_compiling, a no-op torch.compile."""

    what: str
    where: str
    thread: str
    count: int


@dataclass(frozen=True)
class CompiledCallsResult:
    """Everything one watch saw."""

    functions: tuple[FunctionReport, ...]
    degraded: tuple[DegradedCompile, ...]
    leaks: tuple[Leak, ...]

    @property
    def finding(self) -> bool:
        """True when something silently ran uncompiled or degraded, or was refused because of a trace elsewhere."""
        silent = any(r.reason not in HARMLESS for f in self.functions for r in f.uncompiled)
        refused = any("trace" in r.reason for f in self.functions for r in f.raised)
        return silent or refused or bool(self.degraded) or bool(self.leaks)


@dataclass
class _Tally:
    calls: int = 0
    ran: int = 0
    compiles: int = 0
    recompiles: list[str] = field(default_factory=list)
    uncompiled: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    raised: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)


class Watching:
    """Collects events; `result` is complete once the watch has ended and can be read before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: defaultdict[tuple[str, str], _Tally] = defaultdict(_Tally)
        self._sticky: dict[str, str] = {}  # function -> why dynamo gave it up for good
        self._leaks: Counter[tuple[str, str, str]] = Counter()
        self._degraded: list[Event] = []
        self._annotations: list[Event] = []

    def take(self, event: Event) -> None:
        """The recorder's sink; called by every thread."""
        with self._lock:
            if event.kind == "call":
                self._call(event)
            elif event.kind == "degraded":
                self._degraded.append(event)
            elif event.kind == "annotate":
                self._annotations.append(event)
            elif event.kind == "branch":
                self._leaks["is_compiling() was True because of another thread", event.name, event.thread] += 1
            elif event.kind == "wrap" and not event.detail["own"]:
                self._leaks["torch.compile returned the function itself: another thread exports", event.name,
                            event.thread] += 1  # fmt: skip

    def warm(self, name: str, state: ThreadState, start_ns: int, end_ns: int) -> None:
        """Count a warm call; a thread writes only its own tallies, so no lock is needed."""
        tally = self._tallies[name, state.thread]
        tally.calls += 1
        tally.ran += 1

    def _call(self, event: Event) -> None:
        tally = self._tallies[event.name, event.thread]
        detail = event.detail
        tally.calls += 1
        tally.compiles += len(detail.get("compiles", ()))
        tally.recompiles += [why for _, why in detail.get("compiles", ()) if why is not None]
        for reason, text in detail.get("failures", ()):
            if reason != "error suppressed" or "error" not in detail:
                self._sticky[event.name] = f"{reason}: {text}"
        if "error" in detail:
            tally.raised[_refusal(detail), detail["tracing"]] += 1
        elif detail["ran"]:
            tally.ran += 1
        else:
            tally.uncompiled[self._why(event)] += 1

    def _why(self, event: Event) -> tuple[str, tuple[str, ...]]:
        """Why a call returned without compiled code having run, and which threads to blame."""
        detail = event.detail
        if detail["exporting"]:
            return "an export is in progress", detail["tracing"]
        if detail["flag"] and detail["silent_on_trace"]:
            if detail["tracing_itself"]:
                return "traced on purpose by this thread", ()
            return "an FX trace is in progress and error_on_nested_fx_trace is off", detail["tracing"]
        if detail["stance"] != "default":
            setter = detail["stance_setter"]
            if setter == event.thread:
                return "stance set by this thread", ()
            return f"stance {detail['stance']}", (setter,) if setter else ()
        return self._sticky.get(event.name, "nothing to compile"), ()

    @property
    def result(self) -> CompiledCallsResult:
        """What was seen so far."""
        with self._lock:
            functions = tuple(_report(*key, tally) for key, tally in sorted(self._tallies.items()))
            degraded = tuple(d for event in self._degraded if (d := self._blame(event)) is not None)
            leaks = tuple(Leak(*key, count) for key, count in sorted(self._leaks.items()))
        return CompiledCallsResult(functions, degraded, leaks)

    def _blame(self, event: Event) -> DegradedCompile | None:
        """Who degraded a compile; None when only its own thread annotated, on purpose."""
        inside = [a for a in self._annotations if a.start_ns < event.end_ns and a.end_ns > event.start_ns]
        others = sorted({a.thread for a in inside if a.ident != event.ident})
        if inside and not others:
            return None
        cause = f"annotated by {', '.join(others)}" if others else "stored in the on-disk cache: see probes.cache_audit"
        ops = event.detail["ops"]
        return DegradedCompile(event.thread, tuple(op.op for op in ops), sum(op.count for op in ops), cause)


def _refusal(detail: dict[str, object]) -> str:
    error = str(detail["error"])
    if "FX to symbolically trace a dynamo-optimized function" in error:
        return "traced by this thread" if detail["tracing_itself"] else "refused: an FX trace is in progress elsewhere"
    return error


def _report(function: str, thread: str, tally: _Tally) -> FunctionReport:
    def reasons(counts: Counter[tuple[str, tuple[str, ...]]]) -> tuple[Reason, ...]:
        return tuple(Reason(reason, count, blamed) for (reason, blamed), count in counts.most_common())

    return FunctionReport(function, thread, tally.calls, tally.ran, tally.compiles, tuple(tally.recompiles),
                          reasons(tally.uncompiled), reasons(tally.raised))  # fmt: skip


@contextmanager
def watch() -> Iterator[Watching]:
    """Watch every function given to `torch.compile` inside the block, in every thread of the process.

    RuntimeError when a recording is in progress (also one by probes.compile_trace). Functions compiled before the
    block are not seen. All hooks are removed on leaving, exceptions included.
    """
    watching = Watching()
    with recording(watching):
        yield watching


def render(result: CompiledCallsResult) -> None:
    """Print the tables."""
    out = console()
    columns = ("function", "thread", "calls", "ran compiled", "compiles", "not compiled, and why")
    rows = table("compiled functions", *columns)
    for f in result.functions:
        why = [*f.uncompiled, *f.raised]
        text = "\n".join(f"{r.count} x {r.reason}" + (f" [{', '.join(r.blamed)}]" if r.blamed else "") for r in why)
        compiles = f"{f.compiles}" + (f" ({len(f.recompiles)} again: {f.recompiles[-1]})" if f.recompiles else "")
        rows.add_row(f.function, f.thread, str(f.calls), str(f.ran_compiled), compiles, text)
    out.print(rows)
    for d in result.degraded:
        out.print(f"degraded: {d.thread} compiled code that runs {d.calls} ops eagerly ({', '.join(d.ops)}): {d.cause}",
                  soft_wrap=True)  # fmt: skip
    for leak in result.leaks:
        out.print(f"leak: {leak.what}: {leak.count} x in {leak.thread} at {leak.where}", soft_wrap=True)
    out.print(_conclusion(result))


def _conclusion(result: CompiledCallsResult) -> str:
    if result.finding:
        return "finding: not everything ran compiled"
    return "clean: all ran compiled" if result.functions else "clean: no function compiled in the watch was called"


def main(argv: Sequence[str]) -> int:
    """Command line; returns 0 clean, 1 when something silently ran uncompiled or degraded."""
    words, target_words = split_target(argv)
    parser = probe_parser("compiled_calls", __doc__.split("\n", 1)[0], "python -m probes.compiled_calls -- train.py")
    options = parser.parse_args(words)
    target = find_target(target_words)
    with watch() as watching, program(target, lambda outcome: _reported(watching, outcome, as_json=options.json)):
        outcome = run(target)
    return _reported(watching, outcome, as_json=options.json)


def _reported(watching: Watching, outcome: Outcome, *, as_json: bool) -> int:
    result = watching.result
    if as_json:
        print_json(result, after_program=True)
    else:
        render(result)
        show_failure(outcome)
    return FINDING if result.finding or outcome.failed else CLEAN


if __name__ == "__main__":
    run_command(main)
