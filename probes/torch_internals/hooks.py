"""Observers hooked into torch's own FX code: each trace, each eager higher-order environment, each FX check.

All are per process, restore torch on leaving, and change neither results nor the order of torch's own writes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from probes.torch_internals.names import UnsupportedTorch, replaced, resolve

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
def observed_annotations(bracket: Bracket) -> Iterator[None]:
    """Enter `bracket("annotate({...})")` round every `torch.fx.traceback.annotate` block: it writes process metadata.

    The generator's code is swapped, not the name: dynamo recognises `annotate` by identity when it compiles one.
    """
    generator = _plain_generator(resolve("fx.annotate"))
    previous: CodeType = generator.__code__
    original = contextmanager(FunctionType(previous, generator.__globals__))

    @contextmanager
    def annotate(annotation: dict[str, Any]) -> Iterator[None]:
        with bracket(f"annotate({annotation})"), original(annotation):
            yield

    def template(annotation_dict: dict[str, Any]) -> Iterator[None]:
        call: Any = "the callable that takes this constant's place"
        with call(annotation_dict):
            yield

    generator.__code__ = _with_constant(template.__code__, annotate)
    try:
        yield
    finally:
        generator.__code__ = previous


def _plain_generator(function: Any) -> Any:
    inner = inspect.unwrap(function)
    if not inspect.isgeneratorfunction(inner) or inner.__code__.co_freevars:
        raise UnsupportedTorch(f"plain generator behind {function!r}", torch.__version__)
    return inner


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
    """A code object without arguments or globals that returns `target()`."""

    def template() -> Any:
        call: Any = "the callable that takes this constant's place"
        return call()

    return _with_constant(template.__code__, target)


def _with_constant(code: CodeType, target: Callable[..., Any]) -> CodeType:
    """The code with its placeholder constant replaced by a callable: no global name and no cell is needed."""
    constants = tuple(target if value == _PLACEHOLDER else value for value in code.co_consts)
    assert target in constants, "the compiler folded the placeholder away"
    return code.replace(co_consts=constants)
