"""Redirects a function of torch to another callable for every caller, also those that bound it before."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from probes.torch_internals.names import UnsupportedTorch

_TARGET = "the callable that takes this constant's place"


@contextmanager
def redirected(function: Any, make_target: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Make each call of `function` a call of `make_target(original)`, for the process; restored in any case.

    Rebinding a module's name misses `from ... import` copies, and dynamo knows some functions by identity; so the
    function object stays and its code is swapped, in one atomic step. For a function made by
    `contextlib.contextmanager` the original and the target are context managers. Else UnsupportedTorch.
    """
    inner = _python_function(function)
    previous: CodeType = inner.__code__
    copy = FunctionType(previous, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    if inspect.isgeneratorfunction(inner):
        inner.__code__ = _code_calling(make_target(contextmanager(copy)), _entering)
    else:
        inner.__code__ = _code_calling(make_target(copy), _calling)
    try:
        yield
    finally:
        inner.__code__ = previous


def _python_function(function: Any) -> FunctionType:
    inner = inspect.unwrap(function)
    # a code object can only be swapped for one with as many free variables
    if not isinstance(inner, FunctionType) or inner.__code__.co_freevars:
        raise UnsupportedTorch(f"plain Python function {function!r}", torch.__version__)
    return inner


def _calling(*args: Any, **kwargs: Any) -> Any:
    call: Any = "the callable that takes this constant's place"
    return call(*args, **kwargs)


def _entering(*args: Any, **kwargs: Any) -> Iterator[Any]:
    call: Any = "the callable that takes this constant's place"
    with call(*args, **kwargs) as value:
        yield value


def _code_calling(target: Callable[..., Any], shape: Any) -> CodeType:
    """The code of `shape` with `target` in the place of its string constant: it needs no name of any module."""
    constants = tuple(target if value == _TARGET else value for value in shape.__code__.co_consts)
    assert target in constants, "the compiler folded the placeholder away"
    code: CodeType = shape.__code__.replace(co_consts=constants)
    return code
