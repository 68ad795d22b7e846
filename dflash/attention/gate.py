"""The gate: one exclusive holder or many shared ones, for steps whose backward runs in threads of autograd."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash.errors import DflashError
from probes.torch_internals import stash, stashed

_KEY = "dflash.attention.gate"
# seconds after which a wait is given up: longer than any compile that was measured
TIMEOUT_S = 1800.0


class GateTimeout(DflashError):
    """A step waited too long for another thread's; the message names that thread. Exit code 1."""


@dataclass(eq=False)
class Hold:
    """What one thread holds. Autograd hands it on to its own threads and may keep it: `gate` none ends it."""

    gate: "Gate | None"
    thread: str
    label: str = ""
    # the hold of another gate in which this one began
    outer: "Hold | None" = None
    since_s: float = field(default_factory=time.monotonic)
    shared: int = 0
    exclusive: int = 0
    # reasons of the compiles that happened in this hold, noted by whoever watches them
    compiles: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        way = "exclusive" if self.exclusive else "shared"
        return f"{self.thread} ({way}{self.label and ', '}{self.label}, for {time.monotonic() - self.since_s:.1f} s)"


def current_hold() -> Hold | None:
    """The hold of the calling thread, or in a thread of autograd that of the thread whose backward it runs."""
    hold = stashed(_KEY)
    return hold if isinstance(hold, Hold) and hold.gate is not None else None


class Gate:
    """A reader-writer lock. A waiting exclusive holder stops new shared ones, so it is never starved.

    Re-entrant for its thread and for autograd's threads that work for it. Exclusive inside shared gives the shared hold
    up while it waits, so two threads that ask for that at once take turns instead of waiting for each other.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._holds: list[Hold] = []
        self._waiting = 0

    def held(self) -> bool:
        """Whether the calling thread holds the gate, or works for a thread that does."""
        return self._mine() is not None

    @contextmanager
    def shared(self, label: str = "") -> Iterator[Hold]:
        """Held beside other shared holders. Errors: GateTimeout."""
        hold = self._mine()
        if hold is None:
            with self._new_hold(label) as hold:
                with self._changed:
                    self._wait(lambda: not self._exclusive() and not self._waiting, hold)
                    self._take(hold, shared=1)
                yield hold
            return
        with self._counted(hold, shared=1):
            yield hold

    @contextmanager
    def exclusive(self, label: str = "") -> Iterator[Hold]:
        """Held alone. Errors: GateTimeout."""
        hold = self._mine()
        if hold is None:
            with self._new_hold(label) as hold:
                self._take_alone(hold)
                yield hold
        elif hold.exclusive:
            with self._counted(hold, exclusive=1):
                yield hold
        else:
            with self._upgraded(hold):
                yield hold

    # ---- inside

    def _mine(self) -> Hold | None:
        hold = current_hold()
        while hold is not None and hold.gate is not self:
            hold = hold.outer
        return hold

    def _exclusive(self) -> bool:
        return any(hold.exclusive for hold in self._holds)

    def _take(self, hold: Hold, shared: int = 0, exclusive: int = 0) -> None:
        hold.shared, hold.exclusive = shared, exclusive
        hold.since_s = time.monotonic()
        self._holds.append(hold)

    def _take_alone(self, hold: Hold) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._wait(lambda: not self._holds, hold)
                self._take(hold, exclusive=1)
            finally:
                self._waiting -= 1
                self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], hold: Hold) -> None:
        if not self._changed.wait_for(free, self._timeout_s):
            holders = ", ".join(map(str, self._holds)) or f"nobody, {self._waiting} thread(s) wait before it"
            raise GateTimeout(
                f"{hold.thread} waited {self._timeout_s:.0f} s for its step{hold.label and ' '}{hold.label}; held by "
                f"{holders}: look at the stacks (python -m probes.stacks --pid PID)"
            )

    @contextmanager
    def _new_hold(self, label: str) -> Iterator[Hold]:
        outer = current_hold()
        hold = Hold(self, threading.current_thread().name, label, outer)
        stash(_KEY, hold)
        try:
            yield hold
        finally:
            stash(_KEY, outer)
            hold.gate = None
            with self._changed:
                if hold in self._holds:
                    self._holds.remove(hold)
                self._changed.notify_all()

    @contextmanager
    def _counted(self, hold: Hold, shared: int = 0, exclusive: int = 0) -> Iterator[None]:
        hold.shared += shared
        hold.exclusive += exclusive
        try:
            yield
        finally:
            hold.shared -= shared
            hold.exclusive -= exclusive

    @contextmanager
    def _upgraded(self, hold: Hold) -> Iterator[None]:
        shared = hold.shared
        with self._changed:
            self._holds.remove(hold)
            self._changed.notify_all()
        # the thread does nothing while it waits, so nothing of it needs the shared hold
        try:
            self._take_alone(hold)
        except BaseException:
            hold.gate = None  # given up and not got back: it holds nothing any more
            raise
        try:
            yield
        finally:
            with self._changed:
                hold.shared, hold.exclusive = shared, 0
                self._changed.notify_all()


# one a process, because what a compile disturbs is process-wide: strategies of several drafters exclude each other
PROCESS_GATE = Gate()
