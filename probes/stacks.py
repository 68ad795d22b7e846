"""What every thread of a hung or slow process is doing, who owns torch's compile lock, and what that adds up to.

python -m probes.stacks --pid 4242
python -m probes.stacks --after 30 -- train.py --steps 10

The report on a program of its own is printed when it is made; the program goes on, unless it hangs for good.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from probes import stack_sources
from probes.command_line import (
    CLEAN,
    FINDING,
    ProbeParser,
    UsageProblem,
    console,
    print_json,
    probe_parser,
    run_command,
    split_target,
    table,
)
from probes.run_target import Target, find_target
from probes.stack_reading import Reading, read_thread
from probes.stack_sources import Dump

HUNG = ("engine deadlock", "lock cycle", "stuck queue")
FINDINGS = (*HUNG, "long compile")


@dataclass(frozen=True)
class Verdict:
    """One conclusion: its kind (one of FINDINGS, or "none"), a sentence, and the threads it names."""

    kind: str
    text: str
    threads: tuple[str, ...] = ()


@dataclass(frozen=True)
class StacksResult:
    """Everything one observation of a process says."""

    pid: int
    source: str
    note: str
    threads: tuple[Reading, ...]
    lock_owner: str | None
    verdicts: tuple[Verdict, ...]

    @property
    def finding(self) -> bool:
        """True when a verdict names a fault or a compile that lasted the whole window."""
        return any(verdict.kind in FINDINGS for verdict in self.verdicts)

    @property
    def hung(self) -> bool:
        """True when a verdict names a fault that time does not cure."""
        return any(verdict.kind in HUNG for verdict in self.verdicts)


def analyse(dumps: Sequence[Dump]) -> StacksResult:
    """Judge two or more dumps of one process, oldest first: only what held in all of them counts as stuck."""
    assert dumps, "analyse needs at least one dump"
    last = dumps[-1]
    readings = tuple(read_thread(thread) for thread in last.threads)
    stuck = _unchanged(dumps)
    owner = last.lock_owner or next((r.thread.label for r in readings if "compile_lock" in r.holds), None)
    verdicts = [
        *_engine_deadlocks(readings, stuck),
        *_lock_cycles(readings, stuck),
    ]
    if not verdicts:
        verdicts = [*_stuck_queues(readings, stuck), *_long_compiles(dumps)]
    return StacksResult(
        pid=last.pid,
        source=last.source,
        note=last.note,
        threads=readings,
        lock_owner=owner,
        verdicts=tuple(verdicts) or (Verdict("none", "no deadlock, stuck queue or long compile seen"),),
    )


def _unchanged(dumps: Sequence[Dump]) -> frozenset[int]:
    """Ids of the threads whose Python frames are the same in every dump."""
    seen: dict[int, set[tuple[object, ...]]] = {}
    for dump in dumps:
        for thread in dump.threads:
            seen.setdefault(thread.ident, set()).add(thread.frames)
    return frozenset(ident for ident, variants in seen.items() if len(variants) == 1)


def _engine_deadlocks(readings: Sequence[Reading], stuck: frozenset[int]) -> list[Verdict]:
    """The owner of compile_lock waits for autograd while a thread inside autograd waits for compile_lock."""
    owners = [r for r in readings if "compile_lock" in r.holds and r.waits == "autograd engine"]
    blocked = [r for r in readings if r.waits == "compile_lock" and r.in_engine]
    return [
        Verdict(
            "engine deadlock",
            f"{owner.thread.label} holds compile_lock and waits for the autograd engine, whose thread "
            f"{engine.thread.label} compiles a lazy backward and waits for compile_lock",
            (owner.thread.label, engine.thread.label),
        )
        for owner in owners
        for engine in blocked
        if {owner.thread.ident, engine.thread.ident} <= stuck
    ]


def _lock_cycles(readings: Sequence[Reading], stuck: frozenset[int]) -> list[Verdict]:
    """Threads that each hold the lock the next one waits for. Locks are told apart by name, not identity."""
    frozen = [r for r in readings if r.thread.ident in stuck and r.waits in {h for o in readings for h in o.holds}]
    verdicts = []
    for start in frozen:
        chain = [start]
        while True:
            owner = next((r for r in frozen if chain[-1].waits in r.holds and r is not chain[-1]), None)
            if owner is None or (owner in chain and owner is not start):
                break
            if owner is start:
                if start is min(chain, key=lambda r: r.thread.ident):
                    verdicts.append(_cycle_verdict(chain))
                break
            chain.append(owner)
    return verdicts


def _cycle_verdict(chain: Sequence[Reading]) -> Verdict:
    steps = "; ".join(f"{r.thread.label} holds {', '.join(r.holds)} and waits for {r.waits}" for r in chain)
    return Verdict("lock cycle", steps, tuple(r.thread.label for r in chain))


def _stuck_queues(readings: Sequence[Reading], stuck: frozenset[int]) -> list[Verdict]:
    """Some thread waits on a queue and no thread is left that could still serve it."""
    busy = [r for r in readings if r.activity != "idle pool worker"]
    queued = [r for r in busy if r.waits == "queue"]
    if not queued or any(r.waits is None or r.thread.ident not in stuck for r in busy):
        return []
    names = tuple(r.thread.label for r in queued)
    where = "; ".join(f"{r.thread.label} at {r.where}" for r in queued)
    return [Verdict("stuck queue", f"every thread waits and {len(queued)} of them on a queue: {where}", names)]


def _long_compiles(dumps: Sequence[Dump]) -> list[Verdict]:
    """A thread that is inside the same compile in every dump."""
    compiling: dict[int, set[str | None]] = {}
    labels: dict[int, str] = {}
    for dump in dumps:
        for reading in map(read_thread, dump.threads):
            labels[reading.thread.ident] = reading.thread.label
            compiling.setdefault(reading.thread.ident, set()).add(reading.compile_of)
    return [
        Verdict("long compile", f"{labels[ident]} compiles {next(iter(names))} in all {len(dumps)} dumps "
                "and nothing blocks it: wait, or see probes.compile_trace", (labels[ident],))
        for ident, names in compiling.items()
        if len(names) == 1 and None not in names and len(dumps) > 1
    ]  # fmt: skip


def inspect(pid: int, *, window_s: float = 1.0, native: bool = False) -> StacksResult:
    """Observe a live Python process for `window_s` seconds with py-spy; raises StackError when that cannot be done."""
    return analyse(stack_sources.sample(lambda: stack_sources.py_spy_dump(pid, native=native), window_s=window_s))


class watch:
    """Context manager: judge this process's own threads if the block lasts longer than `after_s` seconds.

    Per process; reads only. Entering the same object twice raises RuntimeError. `result` is None when the block
    ended in time. Uses sys._current_frames, so a thread that never releases the GIL hides itself and the others.
    """

    def __init__(self, after_s: float, *, window_s: float = 1.0) -> None:
        self.after_s = after_s
        self.window_s = window_s
        self.result: StacksResult | None = None
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> watch:
        if self._thread is not None:
            raise RuntimeError("stacks.watch entered twice: make one watch per block")
        self._thread = threading.Thread(target=self._observe, name="probes.stacks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._thread is not None
        self._leaving.set()
        self._thread.join()

    def _observe(self) -> None:
        if self._leaving.wait(self.after_s):
            return
        dumps = stack_sources.sample(stack_sources.own_dump, window_s=self.window_s, pause=self._leaving.wait)
        self.result = analyse(dumps)


def render(result: StacksResult, console: Console) -> None:
    """Print one table of threads, the lock's owner and the verdicts."""
    note = f" ({result.note})" if result.note else ""
    title = f"pid {result.pid}, read with {result.source}{note}"
    rows = table(title, "thread", "doing", "holds", "waits for", "where")
    for r in result.threads:
        cells = (r.thread.label, r.activity, ", ".join(r.holds), r.waits or "", r.where)
        rows.add_row(*map(Text, cells))  # as they are: in rich's markup a name could mean something
    console.print(rows)
    owner = result.lock_owner or "nobody seen holding it"
    console.print(f"compile_lock owner: {owner}", markup=False, highlight=False)
    for verdict in result.verdicts:
        console.print(f"verdict: {verdict.kind}: {verdict.text}", markup=False, highlight=False, soft_wrap=True)


def _parser() -> ProbeParser:
    parser = probe_parser(
        "stacks",
        "Classify every thread of a Python process and say whether it is deadlocked.",
        "python -m probes.stacks --after 30s -- train.py --steps 10",
    )
    parser.add_argument("--pid", type=int, help="a live Python process")
    parser.add_argument("--after", type=stack_sources.seconds, help="with -- script.py: look after this long, e.g. 30s")
    parser.add_argument("--window", type=stack_sources.seconds, default=1.0, help="time between the dumps (default 1s)")
    parser.add_argument("--native", action="store_true", help="also show C and C++ frames")
    return parser


def _observe_script(options: argparse.Namespace, target: Target) -> int:
    """Run the program, report at the time asked for, then let it end, or end it when it never will by itself."""
    with stack_sources.started_script(target) as child:
        if not child.still_running_after(options.after):
            assert child.exit_status is not None
            return _report_end(options, child.exit_status)
        dumps = stack_sources.sample(lambda: child.dump(native=options.native), window_s=options.window)
        result = analyse(dumps)
        _report(options, result)
        if result.hung:
            print("stacks: the program is ended, it would not end by itself", file=sys.stderr)
            return FINDING
        status = child.wait()
    return FINDING if result.finding or status else CLEAN


def _report_end(options: argparse.Namespace, status: int) -> int:
    if options.json:
        print_json({"ended_within_s": options.after, "exit_status": status}, after_program=True)
    else:
        console().print(f"the program ended within {options.after:g} s with exit status {status}: nothing hangs")
    return FINDING if status else CLEAN


def _report(options: argparse.Namespace, result: StacksResult) -> None:
    if options.json:
        print_json(result, after_program=options.pid is None)
    else:
        render(result, console())


def main(argv: Sequence[str]) -> int:
    """Command line; returns 0 clean, 1 finding or a program that failed; UsageProblem on bad use."""
    words, target = split_target(argv)
    options = _parser().parse_args(words)
    if (options.pid is None) == (not target) or (options.after is None) != (not target):
        raise UsageProblem("expected --pid N, or --after SECONDS -- script.py [args]; see --help")
    if target:
        return _observe_script(options, find_target(target))
    result = inspect(options.pid, window_s=options.window, native=options.native)
    _report(options, result)
    return FINDING if result.finding else CLEAN


if __name__ == "__main__":
    run_command(main)
