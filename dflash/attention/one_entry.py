"""Compiles a function so that each of its code objects has one compiled entry, which threads can look up safely.

Dynamo keeps the compiled entries of a code object in a list and moves the one that was hit to the front. A thread that
is looking through the list meanwhile can miss a valid entry: it compiles again, and after recompile_limit such misses
dynamo runs the function uncompiled for ever. Measured on torch 2.11, 2.13 and 2.14 with two row lengths and three
threads that did nothing but warm calls: 3 or 4 needless compiles in 20 s; with one entry a code object, none.
"""

import threading
from collections.abc import Callable, Hashable
from functools import wraps
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.attention.base import Fn

_LOCK = threading.Lock()
# a copy of the code for each signature, shared by all threads and instances, so that a shape is compiled once
_CODES: dict[tuple[CodeType, Hashable], CodeType] = {}


def compiled(fn: Fn) -> Fn:
    """Returns `fn` compiled with fixed shapes; the copy of its code that runs is chosen by the arguments' signature.

    Arguments that the signature does not tell apart are still told apart by dynamo, as a second entry.
    """
    variants: dict[Hashable, Callable[..., Any]] = {}

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        key = (signature(args), signature(kwargs), torch.is_grad_enabled())
        variant = variants.get(key)
        if variant is None:
            variant = variants.setdefault(key, torch.compile(_with_code_of_its_own(fn, key), dynamic=False))
        return variant(*args, **kwargs)

    return cast(Fn, call)


def signature(value: Any) -> Hashable:
    """What dynamo guards on in an argument, near enough: nested containers, tensors' metadata, plain values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, BlockMask):
        return "mask", value.shape, value.BLOCK_SIZE, tuple(value.kv_indices.shape), value.kv_indices.device
    if isinstance(value, tuple | list):
        return tuple(signature(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, int | float | str | bool | None):
        return value
    return str(type(value))


def _with_code_of_its_own(fn: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
    if isinstance(fn, MethodType):
        return MethodType(_with_code_of_its_own(fn.__func__, key), fn.__self__)
    assert isinstance(fn, FunctionType), "a Python function or method"
    with _LOCK:
        name = f"{fn.__code__.co_name}_{len(_CODES)}"
        code = _CODES.setdefault((fn.__code__, key), fn.__code__.replace(co_name=name))
    copy = FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy
