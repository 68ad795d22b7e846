"""Strategy force-compile: torch's own switch that skips the nested-trace check, set in the calling thread."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, cast

import torch

from dflash.attention.base import Fn, Role
from dflash.attention.counted_scope import CountedScope
from dflash.attention.one_entry import compiled
from dflash.errors import StrategyError
from probes.torch_internals import config_is_per_context, dynamo_config, is_compiling, observed_traces

FLAG = "force_compile_during_fx_trace"


class ForceCompile:
    """Keeps the compiled kernel while another thread traces; leaves module patches, RNG and the deadlock open."""

    name = "force-compile"
    leaves_open = "traces that corrupt each other, degraded compiles, a rewound random state, deadlock on a shared GPU"

    def __init__(self) -> None:
        if not hasattr(dynamo_config(), FLAG):
            raise StrategyError(f"torch with dynamo's {FLAG} (2.11 to 2.15)", torch.__version__, "use locked-compile")

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function; a call from a trace of its own thread is a StrategyError."""
        return cast(Fn, _refused_in_own_trace(compiled(fn), fn))

    def thread_scope(self) -> AbstractContextManager[None]:
        """Sets the flag for this thread (torch >= 2.12), or for the process while any thread is inside (2.11)."""
        return forced()

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Nothing to hold: steps run side by side, cold or warm."""
        return nullcontext()


class _Depth(threading.local):
    """How many traces of the calling thread are in progress."""

    traces = 0


_DEPTH = _Depth()


@contextmanager
def _one_trace(tracer: str) -> Iterator[None]:
    _DEPTH.traces += 1
    try:
        yield
    finally:
        _DEPTH.traces -= 1


def _refused_in_own_trace(inner: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """The flag hides this thread's own trace from torch too, so torch's refusal is made here."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _DEPTH.traces and not is_compiling():
            raise StrategyError(
                "a compiled call outside any trace of its thread", "one inside", "trace the uncompiled function"
            )
        return inner(*args, **kwargs)

    return call


@contextmanager
def _flag_set() -> Iterator[None]:
    with dynamo_config().patch(**{FLAG: True}):
        yield


_FLAG_FOR_ALL = CountedScope(_flag_set)
_TRACES_COUNTED = CountedScope(lambda: observed_traces(_one_trace))


@contextmanager
def forced() -> Iterator[None]:
    """Sets dynamo's flag and restores it; per thread from torch 2.12, counted per process in 2.11.

    Meanwhile counts each thread's own traces, for the process.
    """
    flag = _flag_set() if config_is_per_context() else _FLAG_FOR_ALL.entered()
    with _TRACES_COUNTED.entered(), flag:
        yield
