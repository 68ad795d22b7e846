"""Records, thread by thread, what torch's compiler does: compiled calls, compiles, traces, waits for compile_lock.

`recording(sink)` hooks the places of `torch_internals` for the whole process, hands every event to `sink`, and takes
the hooks out again in any case. One recording at a time: a second raises RuntimeError. Functions given to
`torch.compile` while recording are watched; callables compiled before are not. Outcomes stay as they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from probes import torch_internals


class Sink(Protocol):
    """What a recording feeds; both methods are called by every thread."""

    def take(self, event: Event) -> None:
        """One event."""

    def warm(self, name: str, state: ThreadState, start_ns: int, end_ns: int) -> None:
        """One warm compiled call, the common case, without the cost of an event."""


@dataclass(slots=True)
class Event:
    """One interval of one thread. Times are `time.perf_counter_ns()`; `detail` depends on `kind`.

    kinds: call, compile, phase, trace, lock wait, annotate, degraded, wrap, branch; and mark, a moment inside one
    """

    kind: str
    name: str
    ident: int
    tid: int
    thread: str
    start_ns: int
    end_ns: int
    detail: dict[str, Any] = field(default_factory=dict)


class ThreadState:
    """What one thread is in the middle of."""

    __slots__ = ("compile_start_ns", "compiles", "failures", "ident", "phases", "ran", "thread", "tid", "trace_depth")

    def __init__(self) -> None:
        self.ran = 0  # executions of compiled graphs
        self.failures: list[tuple[str, str]] = []  # (reason, text) of frames that dynamo gave up on
        self.compiles: list[tuple[str, str | None]] = []  # (frame, recompile reason) inside the current outer call
        self.compile_start_ns = 0
        self.trace_depth = 0
        self.phases: list[tuple[str, int]] = []
        self.ident, self.tid = threading.get_ident(), threading.get_native_id()
        self.thread = threading.current_thread().name


class _Mine(threading.local):
    """The calling thread's state; one look-up here, then plain slots."""

    def __init__(self) -> None:
        self.state = ThreadState()


class Recorder:
    """The hooks' shared state while a recording lasts; see `recording`."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.mine = _Mine()
        self.active = True
        self.tracing: dict[int, tuple[str, int]] = {}  # ident -> (thread, native id) of threads inside Tracer.trace
        self.stance_setter = ""
        # what decides whether a compiled call runs compiled, read at each call
        self.stance_site = torch_internals.site("dynamo.stance")
        self.exporting_site = torch_internals.site("compiler.exporting_flag")
        self.fx_flag = _flag_reader()
        self._settings = torch_internals.dynamo_config()

    def emit(self, kind: str, name: str, start_ns: int, **detail: Any) -> None:
        """Hand one finished interval of the calling thread to the sink."""
        me = self.mine.state
        self.sink.take(Event(kind, name, me.ident, me.tid, me.thread, start_ns, time.perf_counter_ns(), detail))

    def mark(self, name: str) -> None:
        """Tell the sink that something begins or has just been written here."""
        self.emit("mark", name, time.perf_counter_ns())

    def silent_on_trace(self) -> bool:
        """Whether this thread's settings turn the FX check into a silent uncompiled call."""
        return not self._settings.error_on_nested_fx_trace and not self._settings.force_compile_during_fx_trace

    def others_tracing(self) -> tuple[str, ...]:
        """Names of other threads that are inside a trace now."""
        return tuple(thread for ident, (thread, _) in list(self.tracing.items()) if ident != self.mine.state.ident)


_current: Recorder | None = None
_installing = threading.Lock()


def current() -> Recorder | None:
    """The recorder of the recording in progress."""
    return _current


@contextmanager
def recording(sink: Sink) -> Iterator[Recorder]:
    """Hook torch for the whole process and feed `sink` from every thread; restored on exit, RuntimeError if nested."""
    global _current
    with _installing:
        if _current is not None:
            raise RuntimeError("expected no recording in progress, got one: leave it first (one recorder a process)")
        # Before threads start and hooks go in: two first imports can fail each other, and dynamo wraps Tracer.trace
        # once in a process, which must not wrap a hook.
        torch_internals.resolve("inductor.compile_fx")
        torch_internals.resolve("dynamo.patch_torch")()
        from probes import call_hooks, compile_hooks, identity_hooks  # here: they import this module

        recorder = _current = Recorder(sink)
    try:
        with ExitStack() as hooks:
            for install in (call_hooks.install, compile_hooks.install, identity_hooks.install):
                install(recorder, hooks)
            yield recorder
    finally:
        recorder.active = False
        _current = None


def _flag_reader() -> Callable[[], bool]:
    """The fastest read of the FX flag: it is read on every compiled call."""
    if torch_internals.fx_flag_is_per_thread():
        getter: Callable[[], bool] = torch_internals.resolve("fx.get_flag")
        return getter
    holder, attribute = torch_internals.site("fx.flag")
    return lambda: bool(getattr(holder, attribute))
