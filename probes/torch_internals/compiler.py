"""Compiler state: is_compiling, is_exporting, stance, compile_lock and its owner, where the FX check is made."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from probes.torch_internals.names import NAMES, UnsupportedTorch, loaded, resolve

_LOCK_REPR = re.compile(r"<(?P<state>locked|unlocked) .*RLock.* owner=(?P<owner>\d+) count=(?P<count>\d+)")


def is_compiling() -> bool:
    """What `torch.compiler.is_compiling()` tells the calling thread; process-global from 2.13 while dynamo compiles."""
    return bool(torch.compiler.is_compiling())


def is_exporting() -> bool:
    """What `torch.compiler.is_exporting()` tells the calling thread; process-global."""
    return bool(torch.compiler.is_exporting())


def compiling_flag() -> bool:
    """The raw process-global flag behind `is_compiling`."""
    return bool(resolve("compiler.compiling_flag"))


def exporting_flag() -> bool:
    """The raw process-global flag behind `is_exporting`."""
    return bool(resolve("compiler.exporting_flag"))


def stance() -> str:
    """The process's `torch.compiler.set_stance` value; "default" when dynamo was never imported."""
    if not loaded("dynamo.stance"):
        return "default"
    return str(resolve("dynamo.stance").stance)


def compile_lock() -> Any:
    """The lock round dynamo compiles and lazy backward compiles (imports dynamo)."""
    return resolve("dynamo.lock")


@dataclass(frozen=True)
class LockState:
    """compile_lock seen from outside: `owner` is a `threading.get_ident()`, None when free; `count` its depth."""

    owner: int | None
    count: int


def compile_lock_state() -> LockState:
    """Who holds compile_lock, without taking it; free when dynamo was never imported."""
    if not loaded("dynamo.lock"):
        return LockState(None, 0)
    return lock_state(compile_lock())


def lock_state(lock: Any) -> LockState:
    """Owner and depth of any RLock, read from its repr (CPython gives no other way); UnsupportedTorch if unreadable."""
    match = _LOCK_REPR.search(repr(lock))
    if match is None:
        raise UnsupportedTorch(f"readable owner in {lock!r}", torch.__version__)
    if match["state"] == "unlocked":
        return LockState(None, 0)
    return LockState(int(match["owner"]), int(match["count"]))


@dataclass(frozen=True)
class SourceLocation:
    """A place in torch's source: module, function, first line of the function, line of the statement meant."""

    file: str
    function: str
    first_line: int
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def compile_wrapper_check() -> SourceLocation:
    """Where a compiled callable asks whether FX is tracing (imports dynamo); UnsupportedTorch if it does not."""
    wrap = inspect.unwrap(resolve("dynamo.wrap"))
    for code in _nested_codes(wrap.__code__):
        line = _line_that_reads(code, "is_fx_symbolic_tracing") if code.co_name == "compile_wrapper" else None
        if line is not None:
            return SourceLocation(code.co_filename, code.co_name, code.co_firstlineno, line)
    raise UnsupportedTorch(f"FX check in {NAMES['dynamo.wrap'].dotted}", torch.__version__)


def compile_wrapper_code() -> CodeType:
    """The code object every compiled callable runs first: identifies a compiled call in a stack (imports dynamo)."""
    for code in _nested_codes(inspect.unwrap(resolve("dynamo.wrap")).__code__):
        if code.co_name == "compile_wrapper":
            return code
    raise UnsupportedTorch(f"compile_wrapper in {NAMES['dynamo.wrap'].dotted}", torch.__version__)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_codes(constant)


def _line_that_reads(code: CodeType, name: str) -> int | None:
    """The line of the first use of a captured variable; the prologue that copies it into the frame does not count."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        position = instruction.positions
        if position is not None and position.lineno is not None:
            line = position.lineno
        if instruction.argval == name and instruction.opname.startswith("LOAD"):
            return line
    return None
