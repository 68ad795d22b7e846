"""FX tracing state: the flag, the patches on nn.Module, annotations, and the higher-order operators' environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from probes.torch_internals.names import UnsupportedTorch, assign, available, resolve


def fx_flag_is_per_thread() -> bool:
    """Whether this torch keeps the FX tracing flag per thread (2.14 on) or once for the process (up to 2.13)."""
    return available("fx.get_flag")


def fx_flag() -> bool:
    """The raw FX tracing flag: the process's up to torch 2.13, the calling thread's from 2.14."""
    return bool(resolve("fx.get_flag")() if fx_flag_is_per_thread() else resolve("fx.flag"))


def set_fx_flag(value: bool) -> None:
    """Write the raw FX tracing flag (process up to 2.13, calling thread from 2.14); `fx_flag_set_to` restores it."""
    if fx_flag_is_per_thread():
        resolve("fx.set_flag")(value)
    else:
        assign("fx.flag", value)


@contextmanager
def fx_flag_set_to(value: bool) -> Iterator[None]:
    """Hold the FX flag at `value`, then restore it: per process up to torch 2.13, per thread from 2.14."""
    previous = fx_flag()
    set_fx_flag(value)
    try:
        yield
    finally:
        set_fx_flag(previous)


def fx_flag_name() -> str:
    """The dotted torch name of the flag in this torch, for reports."""
    return "torch.fx._symbolic_trace." + (
        "_is_fx_tracing_tls.flag" if fx_flag_is_per_thread() else "_is_fx_tracing_flag"
    )


def is_fx_symbolic_tracing() -> bool:
    """What torch's own check asks: the flag, and not compiling. The function that compiled callables call."""
    return bool(resolve("fx.is_symbolic_tracing")())


def current_patcher() -> object | None:
    """The patcher of the trace in progress, one for the process; None when nobody traces."""
    patcher: object | None = resolve("fx.current_patcher")
    return patcher


def original_module_call() -> Callable[..., Any]:
    """The unpatched `nn.Module.__call__`."""
    call: Callable[..., Any] = resolve("fx.module_call")
    return call


def original_module_getattr() -> Callable[..., Any]:
    """The unpatched `nn.Module.__getattr__`."""
    getter: Callable[..., Any] = resolve("fx.module_getattr")
    return getter


def module_call_is_original() -> bool:
    """Whether `nn.Module.__call__` is unpatched; a trace patches it for every thread."""
    return torch.nn.Module.__call__ is original_module_call()


def module_getattr_is_original() -> bool:
    """Whether `nn.Module.__getattr__` is unpatched; a trace patches it for every thread."""
    return torch.nn.Module.__getattr__ is original_module_getattr()


def restore_module_methods() -> None:
    """Put `nn.Module.__call__` and `__getattr__` back, for the whole process: repairs what FXSTUCK-A leaves."""
    setattr(torch.nn.Module, "__call__", original_module_call())  # noqa: B010 - mypy forbids the plain assignment
    setattr(torch.nn.Module, "__getattr__", original_module_getattr())  # noqa: B010
    assign("fx.current_patcher", None)


def current_meta() -> dict[str, Any]:
    """The process-global metadata that new FX nodes copy; `custom` holds annotations (ANNOTATE in the race list)."""
    meta: dict[str, Any] = resolve("fx.current_meta")
    return meta


def preserves_node_meta() -> bool:
    """Whether some compile or export of the process has node metadata preservation switched on."""
    return bool(resolve("fx.preserve_node_meta"))


def forward_from_src_is_original() -> bool:
    """Whether FX's code builder is unpatched; dynamo patches it for the process round each frame it compiles."""
    # not __module__: dynamo's replacement copies that with functools.wraps
    return bool(resolve("fx.forward_from_src").__globals__["__name__"] == "torch.fx.graph_module")


def pre_dispatch_mode_count() -> int:
    """Modes on the pre-dispatch stack, one stack for the process; 0 at rest."""
    return int(resolve("ops.pre_dispatch_modes").count())


@contextmanager
def swapped_code(function: Any, replacement: Any) -> Iterator[None]:
    """Give a Python function another function's code, for the process: reaches copies bound earlier, unlike rebinding.

    Both need the same number of free variables; the code sees the globals of `function`. Restored in any case.
    """
    inner, other = _plain_function(function), _plain_function(replacement)
    previous = inner.__code__
    inner.__code__ = other.__code__
    try:
        yield
    finally:
        inner.__code__ = previous


def _plain_function(function: Any) -> Any:
    if not hasattr(function, "__code__"):
        raise UnsupportedTorch(f"Python function {function!r}", torch.__version__)
    return function
