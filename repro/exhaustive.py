"""Runs every feasible schedule of two threads of a fault, each in a fork of its own, and counts those that fail."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from probes.torch_internals import not_at_rest, snapshot
from repro.fork import in_fork
from repro.points import hooked
from repro.schedule import Program, Run, Scheduler, explore
from repro.strategy import Scope, in_force


@dataclass(frozen=True)
class Subject:
    """A body with `programs(at)`, and the points of torch at which its two threads can be stopped."""

    name: str
    body: str
    points: frozenset[str]
    own_points: frozenset[str]  # points of the body's own that stop a thread; others pass


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        "FXFLAG",
        "fx_flag",
        frozenset({"trace.flagged", "trace.leaving", "trace.unpatched", "call.check"}),
        frozenset({"body"}),
    ),
    Subject(
        "FXSTUCK-A",
        "fx_stuck_a",
        frozenset({"trace.flagged", "trace.leaving", "trace.unpatched"}),
        frozenset({"body"}),
    ),
    Subject(
        "FXSTUCK-B",
        "fx_stuck_b",
        frozenset({"trace.flagged", "trace.unpatched", "operator.enter", "operator.leaving"}),
        frozenset({"body", "operator"}),
    ),
    Subject(
        "PATCHREVERT",
        "patch_revert",
        frozenset({"trace.leaving", "compile.unlocked"}),
        frozenset({"body", "between", "backend"}),
    ),
    Subject("ANNOTATE", "annotate_keyerror", frozenset({"annotate.left"}), frozenset({"read", "annotated"})),
)


@dataclass(frozen=True)
class Judged:
    """One schedule: the run, and what was wrong with it (errors, deadlock, state left behind); empty when nothing."""

    run: Run
    problems: tuple[str, ...]


@dataclass
class Count:
    """All schedules of one subject."""

    subject: str
    strategy: str | None
    schedules: int = 0
    failing: int = 0
    blocked: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, judged: Judged) -> None:
        self.schedules += 1
        self.failing += bool(judged.problems)
        self.blocked += bool(judged.run.blocked)
        self.problems.update(set(judged.problems))
        for problem in judged.problems:
            self.examples.setdefault(problem, judged.run.schedule)

    def as_json(self) -> dict[str, object]:
        # not dataclasses.asdict: it rebuilds a Counter from pairs, which counts the pairs
        return {**vars(self), "problems": dict(self.problems)}

    def __str__(self) -> str:
        found = "; ".join(
            f"{problem}: {n} (e.g. {self.examples[problem]})" for problem, n in self.problems.most_common()
        )
        return f"{self.subject:12} {self.failing} of {self.schedules} schedules fail. {found}"


def subject(name: str) -> Subject:
    """The subject of that name; KeyError otherwise."""
    return {entry.name: entry for entry in SUBJECTS}[name]


def play(entry: Subject, order: str, strategy: str | None = None) -> Judged:
    """One schedule in a fork: the strategy, the hooks, fresh programs, the order, the judgement."""
    judged: Judged = in_fork(lambda: _play_here(entry, order, strategy))
    return judged


def load(entry: Subject) -> None:
    """Run the programs once, alone, in this process: what torch imports on first use, forks then inherit."""
    for program in importlib.import_module(f"repro.bodies.{entry.body}").programs(str).values():
        program()
    snapshot()


def count(entry: Subject, strategy: str | None = None) -> Count:
    """Every feasible schedule of the subject."""
    load(entry)
    result = Count(entry.name, strategy)
    for judged in _all(entry, strategy):
        result.add(judged)
    return result


def _all(entry: Subject, strategy: str | None) -> Iterator[Judged]:
    judged: list[Judged] = []

    def run_one(prefix: str) -> Run:
        judged.append(play(entry, prefix, strategy))
        return judged[-1].run

    for _ in explore(run_one):
        yield judged[-1]


def _play_here(entry: Subject, order: str, strategy: str | None) -> Judged:
    body = importlib.import_module(f"repro.bodies.{entry.body}")
    holder: list[Scheduler] = []

    def torch_point(name: str) -> None:
        if holder:
            holder[0].point(name)

    def own_point(name: str) -> None:
        if name in entry.own_points:
            torch_point(name)

    with in_force(strategy) as scope:
        with hooked(torch_point, entry.points):
            programs: Mapping[str, Program] = body.programs(own_point)
            holder.append(Scheduler({name: _in_scope(scope, program) for name, program in programs.items()}))
            run = holder[0].run(order)
            holder.clear()
        return Judged(run, tuple(_problems(run, getattr(body, "left_behind", list))))


def _in_scope(scope: Scope, program: Program) -> Program:
    def guarded() -> object:
        with scope(object()):  # a key that never came before: a cold step
            return program()

    return guarded


def _problems(run: Run, left_behind: Callable[[], list[str]]) -> Iterator[str]:
    for name, error in sorted(run.errors.items()):
        yield f"{name} raised {error.splitlines()[0][:90]}"
    if run.deadlocked:
        yield "deadlock"
        return
    for difference in not_at_rest(snapshot()):
        yield f"left {difference.name} {difference.after}"
    yield from left_behind()
