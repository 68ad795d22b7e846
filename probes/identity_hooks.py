"""Hooks on functions that dynamo compares by identity or copied early: their code is swapped, the objects stay.

The replacements run with the globals of torch's modules, so they import what they need.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType, FunctionType
from typing import Any

import torch

from probes import torch_internals
from probes.call_hooks import label
from probes.call_recorder import Recorder, current


def install(recorder: Recorder, hooks: ExitStack) -> None:
    """Swap the four functions' code, for the process, until `hooks` closes."""
    for function, replacement in (
        (torch_internals.resolve("fx.annotate").__wrapped__, _swapped_annotate),
        (torch.compiler.is_compiling, _swapped_is_compiling),
        (torch.compile, _swapped_compile),
        (torch_internals.resolve("dynamo.set_stance"), _swapped_set_stance),
    ):
        _originals[replacement.__name__] = _copy_of(function)
        hooks.enter_context(torch_internals.swapped_code(function, replacement))


_originals: dict[str, FunctionType] = {}


def _copy_of(function: Any) -> FunctionType:
    """The same function under another object, to call while the first one's code is swapped."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _swapped_annotate(annotation_dict):  # type: ignore[no-untyped-def]
    from probes.identity_hooks import observed_annotate

    yield from observed_annotate(annotation_dict)


def observed_annotate(annotation: dict[str, Any]) -> Iterator[None]:
    """`torch.fx.traceback.annotate`'s body, reported when it is the annotation that degrades compiles."""
    start_ns = time.perf_counter_ns()
    try:
        yield from _originals["_swapped_annotate"](annotation)
    finally:
        if (recorder := current()) is not None and annotation.get("fallback_to_eager"):
            recorder.emit("annotate", "fallback_to_eager", start_ns)


def _swapped_is_compiling():  # type: ignore[no-untyped-def]
    from probes.identity_hooks import observed_is_compiling

    return observed_is_compiling()


def observed_is_compiling() -> bool:
    """`torch.compiler.is_compiling`, reported when another thread's compile made it True here."""
    answer = bool(_originals["_swapped_is_compiling"]())
    if answer and (recorder := current()) is not None and not _compiling_here(recorder):
        caller = sys._getframe(2)  # 0 is this function, 1 is_compiling itself
        if caller.f_code.co_name not in ("is_fx_symbolic_tracing", "is_compiling"):
            recorder.emit("branch", _callers(caller), time.perf_counter_ns())
    return answer


def _callers(frame: FrameType) -> str:
    """The two innermost callers, nearest first."""
    frames = [frame] + ([frame.f_back] if frame.f_back is not None else [])
    return " from ".join(
        f"{f.f_code.co_qualname} ({'/'.join(f.f_code.co_filename.split('/')[-2:])}:{f.f_lineno})" for f in frames
    )


def _compiling_here(recorder: Recorder) -> bool:
    mine = recorder.mine.state
    if mine.compile_start_ns or mine.trace_depth or mine.phases:
        return True
    if torch_internals.compile_lock_state().owner == mine.ident:
        return True
    frame = sys._getframe(2)
    while frame is not None:
        if "/torch/export/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _swapped_compile(*args, **kwargs):  # type: ignore[no-untyped-def]
    from probes.identity_hooks import observed_compile

    return observed_compile(*args, **kwargs)


def observed_compile(*args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, reported when it hands the function back uncompiled because an export is going on."""
    exporting = torch_internals.exporting_flag()
    result = _originals["_swapped_compile"](*args, **kwargs)
    model = args[0] if args else kwargs.get("model")
    if (
        exporting
        and result is model
        and model is not None
        and (recorder := current()) is not None
        and not kwargs.get("disable")
    ):
        recorder.emit("wrap", label(model), time.perf_counter_ns(), own=_compiling_here(recorder))
    return result


def _swapped_set_stance(stance):  # type: ignore[no-untyped-def]
    from probes.identity_hooks import observed_set_stance

    return observed_set_stance(stance)


def observed_set_stance(stance: Any) -> Any:
    """Dynamo's setter of the stance, noting which thread called it last."""
    if (recorder := current()) is not None:
        recorder.stance_setter = recorder.mine.state.thread
    return _originals["_swapped_set_stance"](stance)
