"""Strategy locked-compile: cold steps alone in the process, warm steps side by side."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, cast

import torch

from dflash.attention.base import Fn, Role


class Gate:
    """A reader-writer lock: one exclusive holder or many shared ones; a waiting exclusive holder stops new shared ones.

    Not re-entrant: a thread that holds it and asks again would wait for itself, which is an AssertionError here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared = 0
        self._exclusive = False
        self._waiting = 0
        self._thread = threading.local()

    def held(self) -> bool:
        """Whether the calling thread holds the gate."""
        return getattr(self._thread, "held", False)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Held beside other shared holders."""
        self._must_be_outside()
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._waiting)
            self._shared += 1
        self._thread.held = True
        try:
            yield
        finally:
            self._thread.held = False
            with self._changed:
                self._shared -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Held alone."""
        self._must_be_outside()
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._exclusive and not self._shared)
                self._exclusive = True
            finally:  # also when interrupted while waiting: new shared holders must not wait for a thread that left
                self._waiting -= 1
                self._changed.notify_all()
        self._thread.held = True
        try:
            yield
        finally:
            self._thread.held = False
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

    def _must_be_outside(self) -> None:
        assert not self.held(), "this thread already holds the gate"


# one a process, because what a compile disturbs is process-wide: strategies of several drafters exclude each other
PROCESS_GATE = Gate()


class LockedCompile:
    """Compiles with inductor; the first step of every key (forward and backward) excludes every other step.

    A step is warm once its scope ended without an error. A compiled function called outside any step excludes others
    for the call only: its backward is then not covered and may deadlock, so a trainer must use `step_scope`.
    """

    name = "locked-compile"

    def __init__(self, gate: Gate = PROCESS_GATE) -> None:
        self._gate = gate
        self._warm: set[Hashable] = set()
        self.cold_steps = 0

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function behind the gate."""
        compiled = torch.compile(fn, dynamic=False)
        return cast(Fn, self._behind_gate(compiled, fn))

    def _behind_gate(self, compiled: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._gate.held() else self._gate.exclusive():
                return compiled(*args, **kwargs)

        return call

    def thread_scope(self) -> AbstractContextManager[None]:
        """Nothing is set per thread."""
        return nullcontext()

    @contextmanager
    def step_scope(self, key: Hashable) -> Iterator[None]:
        """Exclusive while `key` is cold, shared afterwards. Holds process-wide state."""
        if key in self._warm:
            with self._gate.shared():
                yield
            return
        with self._gate.exclusive():
            yield
            if key not in self._warm:  # another thread may have warmed it while this one waited
                self.cold_steps += 1
                self._warm.add(key)
