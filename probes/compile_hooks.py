"""Hooks that see compiles, their phases, FX traces, waits for compile_lock and degraded generated code."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from probes import torch_internals
from probes.call_recorder import Recorder


def install(recorder: Recorder, hooks: ExitStack) -> None:
    """Put this file's hooks in, for the process, until `hooks` closes."""
    for key, hook in (
        ("dynamo.compile_frame", _hook_compile),
        ("dynamo.event_start", _hook_phase_start),
        ("dynamo.event_end", _hook_phase_end),
        ("fx.trace", _hook_trace),
        ("fx.patch_method", _hook_patch),
        ("inductor.post_compile", _hook_post_compile),
        ("dynamo.lock", TimedLock),
    ):
        hooks.enter_context(torch_internals.replaced(key, hook(recorder, torch_internals.resolve(key))))


def _hook_compile(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_frame(code: Any, *args: Any, **kwargs: Any) -> Any:
        mine = recorder.mine.state
        start_ns = time.perf_counter_ns()
        outer, mine.compile_start_ns = mine.compile_start_ns, mine.compile_start_ns or start_ns
        name = f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
        failure: tuple[str, str] | None = None
        recorder.mark("begin compile")
        try:
            result = original(code, *args, **kwargs)
        except Exception as error:
            failure = _failure(error)
            mine.failures.append(failure)
            raise
        finally:
            mine.compile_start_ns = outer
            reason = _recompile_reason(kwargs.get("compile_id"))
            mine.compiles.append((name, reason))
            recorder.emit("compile", name, start_ns, recompile=reason, failure=failure)
        return result

    return compile_frame


def _failure(error: Exception) -> tuple[str, str]:
    """What an exception out of one frame's compile means: a limit, something unsupported, or an error."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "recompile limit exceeded" in text.lower() or type(error).__name__ == "FailOnRecompileLimitHit":
        return "recompile limit", text
    if type(error).__name__ in ("Unsupported", "UserError", "SkipFrame"):
        return "unsupported by dynamo", text
    return "error suppressed", f"{type(error).__name__}: {text}"


def _recompile_reason(compile_id: object) -> str | None:
    """Why dynamo compiled a frame again, from its own record of this compile; None for a first compile."""
    records = torch_internals.resolve("dynamo.metrics")()
    if not records or str(records[-1].compile_id) != str(compile_id) or records[-1].recompile_reason is None:
        return None
    return str(records[-1].recompile_reason).splitlines()[0]


def _hook_phase_start(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log_event_start(logger: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        recorder.mine.state.phases.append((event_name, time.perf_counter_ns()))
        recorder.mark(event_name)
        return original(logger, event_name, *args, **kwargs)

    return log_event_start


def _hook_phase_end(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log_event_end(logger: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
        phases = recorder.mine.state.phases
        while phases:
            name, start_ns = phases.pop()
            recorder.emit("phase", name, start_ns)
            if name == event_name:
                break
        return original(logger, event_name, *args, **kwargs)

    return log_event_end


def _hook_post_compile(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    from probes.cache_audit import degraded_ops  # here: it imports inductor

    @functools.wraps(original)
    def post_compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        ops = degraded_ops(graph.source_code or "")
        if ops:
            start_ns = recorder.mine.state.compile_start_ns or time.perf_counter_ns()
            recorder.emit("degraded", "generated code", start_ns, ops=ops)
        return result

    return post_compile


def _hook_trace(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trace(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        mine = recorder.mine.state
        start_ns = time.perf_counter_ns()
        mine.trace_depth += 1
        recorder.tracing[mine.ident] = (mine.thread, mine.tid)
        recorder.mark("begin trace")
        try:
            return original(tracer, *args, **kwargs)
        finally:
            mine.trace_depth -= 1
            if not mine.trace_depth:
                recorder.tracing.pop(mine.ident, None)
            recorder.emit("trace", type(tracer).__name__, start_ns)

    return trace


def _hook_patch(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patch_method(patcher: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(patcher, *args, **kwargs)
        recorder.mark("patch")
        return result

    return patch_method


class TimedLock:
    """compile_lock itself, with each wait for it reported; it wraps the one real lock, so nobody can pass it by."""

    def __init__(self, recorder: Recorder, lock: Any) -> None:
        self._recorder = recorder
        self._lock = lock

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.RLock.acquire`."""
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        start_ns = time.perf_counter_ns()
        owner = _thread_name(
            torch_internals.lock_state(self._lock).owner
        )  # now: it may have ended when we get the lock
        taken: bool = self._lock.acquire(timeout=timeout)
        if self._recorder.active:
            self._recorder.emit("lock wait", "compile_lock", start_ns, owner=owner)
        return taken

    def release(self) -> None:
        """As `threading.RLock.release`."""
        self._lock.release()

    def __repr__(self) -> str:
        return repr(self._lock)


def _thread_name(ident: int | None) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), "")
