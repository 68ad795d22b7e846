"""Observers hooked into torch's own FX code: each trace, each eager higher-order environment, each FX check.

All are per process, restore torch on leaving, and change neither results nor the order of torch's own writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any

from probes.torch_internals.names import replaced, resolve

Bracket = Callable[[str], AbstractContextManager[None]]
_PLACEHOLDER = "the callable that takes this constant's place"


@contextmanager
def observed_traces(bracket: Bracket) -> Iterator[None]:
    """Enter `bracket(tracer class name)` round every `Tracer.trace` of the process, in the tracing thread."""
    original = resolve("fx.trace")

    @functools.wraps(original)
    def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        with bracket(type(self).__name__):
            return original(self, *args, **kwargs)

    with replaced("fx.trace", trace):
        yield


@contextmanager
def observed_higher_order_environments(bracket: Bracket) -> Iterator[None]:
    """Enter `bracket("eager higher-order operator")` round every scope in which such an operator clears the flag."""
    original = resolve("hop.set_env")

    @contextmanager
    def set_env(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with bracket("eager higher-order operator"), original(*args, **kwargs) as entered:
            yield entered

    with replaced("hop.set_env", set_env):
        yield


@contextmanager
def observed_fx_checks(asked: Callable[[Callable[[], bool]], bool]) -> Iterator[Callable[[], bool]]:
    """Route every `is_fx_symbolic_tracing()` of the process through `asked(ask)`; yields the unobserved `ask`.

    Compiled callables bound that function when they were made, so its code is swapped, in one atomic step.
    """
    function = resolve("fx.is_symbolic_tracing")
    previous: CodeType = function.__code__
    ask = FunctionType(previous, function.__globals__)

    def answer() -> bool:
        return asked(ask)

    function.__code__ = _code_calling(answer)
    try:
        yield ask
    finally:
        function.__code__ = previous


def _code_calling(target: Callable[[], bool]) -> CodeType:
    """A code object without arguments or globals that returns `target()`: the callable sits among its constants."""

    def direct() -> Any:
        call: Any = "the callable that takes this constant's place"
        return call()

    constants = tuple(target if value == _PLACEHOLDER else value for value in direct.__code__.co_consts)
    assert target in constants, "the compiler folded the placeholder away"
    return direct.__code__.replace(co_consts=constants)
