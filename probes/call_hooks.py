"""Hooks that see each call of a compiled function and each run of a compiled graph."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch

from probes import torch_internals
from probes.call_recorder import Recorder


def install(recorder: Recorder, hooks: ExitStack) -> None:
    """Put this file's hooks in, for the process, until `hooks` closes."""
    for key, hook in (
        ("dynamo.wrap", _hook_wrap),
        ("dynamo.call_backend", _hook_backend),
    ):
        hooks.enter_context(torch_internals.replaced(key, hook(recorder, torch_internals.resolve(key))))


def _hook_wrap(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(context: Any, fn: Any) -> Any:
        wrapped = original(context, fn)
        # a Module becomes an OptimizedModule, whose inner function comes through here by itself
        return _watched(recorder, wrapped) if isinstance(wrapped, FunctionType) else wrapped

    return wrap


def _watched(recorder: Recorder, compiled: FunctionType) -> Callable[..., Any]:
    """A compiled callable that reports each outermost call; one attribute test more once the recording is over."""
    name = label(compiled)
    mine = recorder.mine
    clock, warm, flag = time.perf_counter_ns, recorder.sink.warm, recorder.fx_flag
    (stances, stance), (exports, exporting) = recorder.stance_site, recorder.exporting_site

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.active:
            return compiled(*args, **kwargs)
        start_ns = clock()
        entry = flag(), getattr(exports, exporting), getattr(stances, stance)
        state = mine.state
        ran, failures, compiles = state.ran, len(state.failures), len(state.compiles)
        try:
            result = compiled(*args, **kwargs)
        except BaseException as error:
            _finish(recorder, name, start_ns, entry, (state.ran - ran, failures, compiles), error)
            raise
        if state.ran == ran + 1 and len(state.compiles) == compiles and len(state.failures) == failures:
            # the common case, a warm call, is kept short: it is what the overhead is measured on
            warm(name, state, start_ns, clock())
        else:
            _finish(recorder, name, start_ns, entry, (state.ran - ran, failures, compiles), None)
        return result

    call.__dict__.update(vars(compiled))
    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
    return call


def _finish(
    recorder: Recorder,
    name: str,
    start_ns: int,
    entry: tuple[bool, bool, Any],
    marks: tuple[int, int, int],
    error: BaseException | None,
) -> None:
    """Report one compiled call that has just ended; `marks` are executions, and counts noted when it began."""
    mine = recorder.mine.state
    ran, failures, compiles = marks
    detail: dict[str, Any] = {"ran": ran}
    if len(mine.compiles) > compiles:
        detail["compiles"] = mine.compiles[compiles:]
        del mine.compiles[compiles:]
    if len(mine.failures) > failures:
        detail["failures"] = mine.failures[failures:]
        del mine.failures[failures:]
    if error is not None:
        detail["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    if error is not None or not ran:
        flag, exporting, stance = entry
        detail |= {"flag": flag, "exporting": exporting, "stance": stance.stance, "tracing": recorder.others_tracing()}
        detail |= {"silent_on_trace": recorder.silent_on_trace(), "stance_setter": recorder.stance_setter}
        detail["tracing_itself"] = bool(mine.trace_depth)
    recorder.emit("call", name, start_ns, **detail)


def label(compiled: Any) -> str:
    """`qualname (file:line)` of the user's function behind a compiled callable."""
    inner = compiled
    while hasattr(inner, "_torchdynamo_orig_callable"):
        inner = inner._torchdynamo_orig_callable
    inner = inspect.unwrap(inner)
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return f"{type(owner).__qualname__} module"
    code = getattr(inner, "__code__", None)
    where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(inner, '__qualname__', type(inner).__qualname__)}{where}"


def _hook_backend(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_user_compiler(graph: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = _settled(original(graph, *args, **kwargs))
        mine = recorder.mine

        @functools.wraps(compiled)
        def counted(*inputs: Any, **named: Any) -> Any:
            mine.state.ran += 1
            return compiled(*inputs, **named)

        return counted

    return call_user_compiler


def _settled(compiled: Any) -> Any:
    """What dynamo would do next to a graph module whose code is generated late, and cannot do to a wrapper of it."""
    module = getattr(compiled, "__self__", None)
    if getattr(compiled, "__name__", "") != "_lazy_forward" or module is None:
        return compiled
    torch_internals.resolve("fx.force_recompile")(module)
    return module.forward
