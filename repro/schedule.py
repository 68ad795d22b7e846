"""Runs threads one at a time through named sync points, in the order of a string such as "AABAB".

A letter lets that thread run from the sync point where it stands to its next one. Threads that wait for a lock are
reported as blocked. `explore` runs every feasible order. Knows nothing of torch: `points.py` puts the points into it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["parked", "running", "blocked", "done"]
Program = Callable[[], object]

_SAMPLE_S = 0.003
# asleep, without a tick of CPU time, in this many samples in a row: waiting for another thread, not merely slow
_ASLEEP_SAMPLES = 20


@dataclass(frozen=True)
class Step:
    """One move: `thread` ran until `point` ("end" when it finished, "blocked: <where>" when it waits for a lock)."""

    thread: str
    point: str

    def __str__(self) -> str:
        return f"{self.thread}:{self.point}"


@dataclass(frozen=True)
class Run:
    """What one schedule did. `errors` by thread; `schedule` replays the run; `choices` are the threads free to move."""

    schedule: str
    trace: tuple[Step, ...]
    choices: tuple[str, ...]
    errors: Mapping[str, str]
    skipped: tuple[str, ...]  # letters of the asked order that could not move: thread blocked, finished or unknown
    deadlocked: bool

    @property
    def blocked(self) -> tuple[Step, ...]:
        """The moves that ended at a lock."""
        return tuple(step for step in self.trace if step.point.startswith("blocked"))


@dataclass
class _Worker:
    name: str
    program: Program
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    state: State = "running"
    point: str = ""
    error: str | None = None
    thread: threading.Thread | None = None
    cpu_s: float = -1.0
    asleep: int = 0


class Scheduler:
    """Holds the threads of one run; `point` is the sync point that programs and hooks call. One run an instance."""

    def __init__(self, programs: Mapping[str, Program], limit_s: float = 60.0) -> None:
        """`programs`: one-letter name to body. `limit_s`: a move that neither parks, ends nor blocks raises."""
        assert all(len(name) == 1 for name in programs), "thread names are single letters"
        self._workers = {name: _Worker(name, program) for name, program in sorted(programs.items())}
        self._by_ident: dict[int, _Worker] = {}
        self._changed = threading.Condition()
        self._limit_s = limit_s
        self._trace: list[Step] = []

    def point(self, name: str) -> None:
        """Stop here until the schedule lets this thread move on; threads of no schedule pass, and are recorded as ?."""
        worker = self._by_ident.get(threading.get_ident())
        if worker is None:
            self._trace.append(Step("?", name))
            return
        self._park(worker, name)

    def run(self, order: str = "") -> Run:
        """Run `order`, then whatever is left in order of name. Exceptions of the threads are results, not failures."""
        for worker in self._workers.values():
            self._start(worker)
        self._settle()
        taken, choices, skipped = "", [], []
        wanted = list(order)
        while enabled := self._enabled():
            name = wanted.pop(0) if wanted else enabled[0]
            if name not in enabled:
                skipped.append(f"{name}:{self._workers[name].state if name in self._workers else 'unknown'}")
                continue
            taken += name
            choices.append(enabled)
            self._move(self._workers[name])
        return self._result(taken, choices, skipped)

    def _result(self, taken: str, choices: list[str], skipped: list[str]) -> Run:
        stuck = any(worker.state != "done" for worker in self._workers.values())
        errors = {worker.name: worker.error for worker in self._workers.values() if worker.error is not None}
        return Run(taken, tuple(self._trace), tuple(choices), errors, tuple(skipped), deadlocked=stuck)

    def _enabled(self) -> str:
        return "".join(name for name, worker in self._workers.items() if worker.state == "parked")

    def _start(self, worker: _Worker) -> None:
        worker.thread = threading.Thread(target=self._body, args=(worker,), name=worker.name, daemon=True)
        worker.thread.start()

    def _body(self, worker: _Worker) -> None:
        self._by_ident[threading.get_ident()] = worker
        try:
            self._park(worker, "start")
            worker.program()
        except BaseException as error:  # noqa: BLE001 - whatever the program raises is the result of the run
            worker.error = "".join(traceback.format_exception_only(error)).strip()
        with self._changed:
            worker.state, worker.point = "done", "end"
            self._changed.notify_all()

    def _park(self, worker: _Worker, name: str) -> None:
        with self._changed:
            worker.state, worker.point = "parked", name
            self._changed.notify_all()
        worker.go.acquire()

    def _move(self, worker: _Worker) -> None:
        before = {other.name: (other.state, other.point) for other in self._workers.values()}
        with self._changed:
            worker.state, worker.asleep, worker.cpu_s = "running", 0, -1.0
        worker.go.release()
        self._settle()
        self._trace.append(Step(worker.name, self._describe(worker)))
        for other in self._workers.values():  # threads that a lock released in passing
            if other is not worker and before[other.name][0] == "blocked" and other.state != "blocked":
                self._trace.append(Step(other.name, self._describe(other)))

    def _describe(self, worker: _Worker) -> str:
        return f"blocked: {self._where(worker)}" if worker.state == "blocked" else worker.point

    def _settle(self) -> None:
        """Wait until every thread is parked, done, or waits for another thread."""
        deadline = time.monotonic() + self._limit_s
        for worker in self._workers.values():
            worker.asleep = 0
            if worker.state == "blocked":
                worker.state = "running"  # a lock may just have been released
        while running := [worker for worker in self._workers.values() if worker.state == "running"]:
            with self._changed:
                self._changed.wait(_SAMPLE_S)
                for worker in running:
                    self._sample(worker)
            if time.monotonic() > deadline:
                places = ", ".join(f"{worker.name} at {self._where(worker)}" for worker in running)
                raise TimeoutError(f"expected every thread to reach a sync point in {self._limit_s} s, got: {places}")

    def _sample(self, worker: _Worker) -> None:
        """Mark a thread blocked once it slept through enough samples; a thread that waits for a CPU does not sleep."""
        if worker.state != "running" or worker.thread is None or worker.thread.ident is None:
            return
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(worker.thread.ident))
        asleep = cpu_s == worker.cpu_s and _kernel_state(worker.thread.native_id) == "S"
        worker.asleep = worker.asleep + 1 if asleep else 0
        worker.cpu_s = cpu_s
        if worker.asleep >= _ASLEEP_SAMPLES:
            worker.state = "blocked"

    def _where(self, worker: _Worker) -> str:
        ident = worker.thread.ident if worker.thread is not None else None
        frame = sys._current_frames().get(ident) if ident is not None else None
        if frame is None:
            return "unknown"
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _kernel_state(native_id: int | None) -> str:
    """The kernel's one-letter state of a thread of this process (Linux): R runs or waits for a CPU, S sleeps."""
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except FileNotFoundError:  # the thread has just ended
        return "R"
    return stat.rpartition(")")[2].split()[0]


def explore(run_one: Callable[[str], Run]) -> Iterator[Run]:
    """Every feasible schedule, each once. `run_one(prefix)` runs from fresh state, as `Scheduler.run` does."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        run = run_one(prefix)
        yield run
        for position in range(len(prefix), len(run.schedule)):
            for other in run.choices[position]:
                if other != run.schedule[position]:
                    pending.append(run.schedule[:position] + other)
