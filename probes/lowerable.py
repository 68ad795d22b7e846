"""Which ops inductor always turns into generated code, so that an eager call to one in its output is a degradation.

Asked of the installed torch, not of a table: an op counts when it has a lowering, that lowering is no registered
fallback, and the lowering's own code never mentions one. Ops that fall back for some sizes or types (sort, index,
embedding, pow, ...) do not count, so their degradation alone goes unseen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from probes import torch_internals

# part of the shared plumbing of every pointwise lowering, not a way out of it
_PLUMBING = frozenset({"triton_fallback", "fallback_handler", "fallbacks", "_is_fallback_handler"})


@functools.lru_cache(maxsize=4096)
def lowers_always(namespace: str, name: str, overload: str) -> bool:
    """Whether `torch.ops.<namespace>.<name>.<overload>` is always generated (imports inductor's lowerings)."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    op = getattr(packet, overload, None)
    lowering = torch_internals.resolve("inductor.lowerings").get(op)
    if op is None or lowering is None or op in torch_internals.resolve("inductor.fallbacks"):
        return False
    return not _mentions_fallback(lowering)


def _mentions_fallback(lowering: Callable[..., Any]) -> bool:
    function = inspect.unwrap(lowering)
    if not isinstance(function, FunctionType):
        return True  # cannot be read: do not accuse
    own = {name for name in _names(function.__code__) if "fallback" in name} - {"triton_fallback"}
    called = {
        name
        for callee in _called(function)
        for name in _names(callee.__code__)
        if "fallback" in name and name not in _PLUMBING
    }
    return bool(own | called)


def _names(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _called(function: FunctionType) -> Iterator[FunctionType]:
    """Functions of the same module that it names, and functions that it closes over."""
    for name in _names(function.__code__):
        found = function.__globals__.get(name)
        if isinstance(found, FunctionType) and found.__module__ == function.__module__:
            yield found
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, FunctionType):
            yield cell.cell_contents
