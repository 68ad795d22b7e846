"""Records who writes the FX tracing flag, who reads it, and in which thread: the engine of `probes.fx_state`."""

from __future__ import annotations

import enum
import functools
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from probes import torch_internals as ti
from probes.run_target import FoundFunction, rebound

KEPT_READINGS = 5_000
KEPT_WRITES = 5_000
TORCH_FRAMES = 4
PROGRAM_FRAMES = 8
CHECK = "a compiled call's own check"


class Verdict(enum.Enum):
    """Why the flag (or the patches that go with it) was seen at a reading, mildest first."""

    NEVER = "never active"
    SAME_THREAD = "active in the same thread (inherent to the program)"
    PATCHED = "nn.Module patched by another thread's trace (a race)"
    LEFT_ON = "active although nobody traces (left on by a race that is over)"
    OTHER_THREAD = "active because of another thread (a race)"

    @property
    def rank(self) -> int:
        return list(Verdict).index(self)


@dataclass(frozen=True)
class ThreadName:
    """A thread as people and tools name it: its Python name, `threading.get_ident()`, and the kernel's thread id."""

    name: str
    ident: int
    native_id: int

    @classmethod
    def current(cls) -> ThreadName:
        return cls(threading.current_thread().name, threading.get_ident(), threading.get_native_id())

    def __str__(self) -> str:
        return f"{self.name} (tid {self.native_id})"


@dataclass(frozen=True)
class Writing:
    """One scope that wrote the flag or annotations: seconds since the watch began; `ended_s` None while it runs."""

    thread: ThreadName
    by: str
    began_s: float
    ended_s: float | None
    left_flag: bool | None  # the raw flag just after the scope, as its thread sees it
    stack: tuple[str, ...]  # innermost last


@dataclass(frozen=True)
class Reading:
    """One look at the state: public helpers first, then the raw private state, then whose doing it is."""

    at_s: float
    thread: ThreadName
    where: str
    event: str  # enter, exit, raise, check, begin, end
    phase: str
    is_fx_symbolic_tracing: bool
    is_compiling: bool
    is_exporting: bool
    raw_flag: bool
    module_patched: bool
    verdict: Verdict
    writer: Writing | None  # whose scope made the flag what it is; None when never active or not seen


class _Scope:
    """A running flag-writing scope; becomes a `Writing` when told."""

    def __init__(self, by: str, began_s: float) -> None:
        self.by = by
        self.thread = ThreadName.current()
        self.began_s = began_s
        self.ended_s: float | None = None
        self.left_flag: bool | None = None
        self.stack = _caller_stack()

    def frozen(self) -> Writing:
        return Writing(self.thread, self.by, self.began_s, self.ended_s, self.left_flag, self.stack)


def _caller_stack() -> tuple[str, ...]:
    """The innermost frames of torch and, outside torch, of the program, innermost last: `file:line in function`."""
    theirs, program = 0, 0
    kept: list[str] = []
    for frame, line in traceback.walk_stack(None):
        name = frame.f_globals.get("__name__", "")
        if _is_machinery(name):
            continue
        if name.split(".")[0] == "torch":
            theirs += 1
            keep = theirs <= TORCH_FRAMES
        else:
            program += 1
            keep = program <= PROGRAM_FRAMES
        if keep:
            kept.append(f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}")
    return tuple(reversed(kept))


def _is_machinery(module: str) -> bool:
    """Frames that say nothing about who traced: the probes' own, and how threads, context managers and runpy start."""
    if module.startswith("probes."):
        return module != "probes.case_target"
    return module in ("contextlib", "functools", "threading", "runpy")


_active: FxRecorder | None = None


class FxRecorder:
    """Context manager: hooks the writers and readers of the FX flag for the whole process, restored on leaving.

    One at a time: entering a second one while the first is entered raises RuntimeError. Never entered again.
    """

    def __init__(self, functions: Sequence[FoundFunction] = ()) -> None:
        self._functions = tuple(functions)
        self._began = time.perf_counter()
        self._hooks = ExitStack()
        self._guard = threading.RLock()
        self._open: list[_Scope] = []
        self._scopes: list[_Scope] = []
        self._ask = ti.is_fx_symbolic_tracing
        self._readings: list[tuple[Reading, _Scope | None]] = []
        self._phases = threading.local()
        self.counts: Counter[tuple[str, str, str]] = Counter()  # (where, thread name, verdict) -> readings
        self.scopes_seen = 0

    def __enter__(self) -> FxRecorder:
        global _active
        if _active is not None:
            raise RuntimeError("expected no other FX recorder, got one that is entered; leave it first")
        with ExitStack() as hooks:
            hooks.enter_context(ti.observed_traces(self._tracing))
            hooks.enter_context(ti.observed_higher_order_environments(self._higher_order))
            hooks.enter_context(ti.observed_annotations(self._annotating))
            self._ask = hooks.enter_context(ti.observed_fx_checks(self._checked))
            for found in self._functions:
                hooks.enter_context(rebound(found, self._watching(found)))
            self._hooks = hooks.pop_all()
        _active = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _active
        _active = None
        self._hooks.close()

    def readings(self) -> tuple[Reading, ...]:
        """Kept readings in order: all that saw something up to 5,000, and the first 5,000 that saw nothing."""
        with self._guard:
            kept = list(self._readings)
        return tuple(_with_writer(reading, scope) for reading, scope in kept)

    def writings(self) -> tuple[Writing, ...]:
        """Kept flag-writing scopes, in order of their beginning: the first 5,000."""
        with self._guard:
            return tuple(scope.frozen() for scope in self._scopes)

    def read(self, where: str, event: str) -> Reading:
        """Look at the state now, in this thread, and keep what was seen."""
        with self._guard:
            reading, scope = self._look(where, event)
            self.counts[(where, reading.thread.name, reading.verdict.value)] += 1
            if len(self._readings) < KEPT_READINGS or (
                reading.verdict is not Verdict.NEVER and len(self._readings) < 2 * KEPT_READINGS
            ):
                self._readings.append((reading, scope))
            return reading

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label this thread's readings and take one on each side of the block."""
        previous = getattr(self._phases, "name", "")
        self._phases.name = name
        self.read(f"phase {name}", "begin")
        try:
            yield
        finally:
            self.read(f"phase {name}", "end")
            self._phases.name = previous

    def _look(self, where: str, event: str) -> tuple[Reading, _Scope | None]:
        raw, patched = ti.fx_flag(), not ti.module_call_is_original()
        verdict, scope = self._explain(raw, patched)
        reading = Reading(
            at_s=time.perf_counter() - self._began,
            thread=ThreadName.current(),
            where=where,
            event=event,
            phase=getattr(self._phases, "name", ""),
            is_fx_symbolic_tracing=self._ask(),
            is_compiling=ti.is_compiling(),
            is_exporting=ti.is_exporting(),
            raw_flag=raw,
            module_patched=patched,
            verdict=verdict,
            writer=None,
        )
        return reading, scope

    def _explain(self, raw: bool, patched: bool) -> tuple[Verdict, _Scope | None]:
        me = threading.get_ident()
        own = [scope for scope in self._open if scope.thread.ident == me]
        others = [scope for scope in self._open if scope.thread.ident != me]
        if raw and own:
            return Verdict.SAME_THREAD, own[-1]
        if raw and others and not ti.fx_flag_is_per_thread():
            return Verdict.OTHER_THREAD, others[-1]
        if raw:
            return Verdict.LEFT_ON, self._last_that_left_it_on()
        if patched and not own:
            return Verdict.PATCHED, others[-1] if others else None
        return Verdict.NEVER, None

    def _last_that_left_it_on(self) -> _Scope | None:
        ended = [scope for scope in self._scopes if scope.left_flag]
        return max(ended, key=lambda scope: scope.ended_s or 0.0, default=None)

    @contextmanager
    def _tracing(self, tracer: str) -> Iterator[None]:
        with self._scope(f"Tracer.trace of {tracer}", writes_true=True):
            yield

    @contextmanager
    def _higher_order(self, by: str) -> Iterator[None]:
        with self._scope(by, writes_true=False):
            yield

    @contextmanager
    def _annotating(self, by: str) -> Iterator[None]:
        with self._scope(by, writes_true=False):
            yield

    @contextmanager
    def _scope(self, by: str, writes_true: bool) -> Iterator[None]:
        scope = _Scope(by, time.perf_counter() - self._began)
        with self._guard:
            self.scopes_seen += 1
            if writes_true:
                self._open.append(scope)
            if len(self._scopes) < KEPT_WRITES:
                self._scopes.append(scope)
        try:
            yield
        finally:
            with self._guard:
                if writes_true:
                    self._open.remove(scope)
                scope.ended_s = time.perf_counter() - self._began
                scope.left_flag = ti.fx_flag()

    def _checked(self, ask: Callable[[], bool]) -> bool:
        with self._guard:  # a trace that ends between answer and reading would leave the answer unexplained
            answer = ask()
            self.read(CHECK, "check")
        return answer

    def _watching(self, found: FoundFunction) -> Callable[..., Any]:
        function, where = found.function, found.spec

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # dynamo folds this to True while it traces, so compiled code never contains the probe
            if torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            self.read(where, "enter")
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self.read(where, "raise")
                raise
            self.read(where, "exit")
            return result

        return watched


def _with_writer(reading: Reading, scope: _Scope | None) -> Reading:
    return reading if scope is None else replace(reading, writer=scope.frozen())


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Label a part of a program for the recorder in force; does nothing when there is none."""
    recorder = _active
    if recorder is None:
        yield
        return
    with recorder.phase(name):
        yield
