"""The sync points in torch: where a schedule can stop a thread. Installed for the process, removed on exit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from probes.torch_internals import replaced, resolve

Point = Callable[[str], None]

POINTS = {
    "trace.enter": "Tracer.trace was called; the flag is not set yet",
    "trace.flagged": "the FX flag is set, no patcher yet",
    "trace.patcher": "CURRENT_PATCHER is set, nn.Module is patched next; the traced body follows",
    "trace.leaving": "the body was traced, patches and flag are still on",
    "trace.unpatched": "the patches were reverted, the flag is still on",
    "trace.restored": "flag and patches are as Tracer.trace found them",
    "call.check": "a compiled callable is about to ask whether FX is tracing",
    "call.callback": "the check was passed, the dynamo callback is set next",
    "call.restored": "the dynamo callback was taken off",
    "compile.lock": "about to take compile_lock (a compile, or a lazy backward's)",
    "compile.locked": "compile_lock is held",
    "compile.unlocked": "compile_lock was released",
    "operator.enter": "an eager higher-order operator is about to save and clear the flag",
    "operator.in": "the flag is cleared",
    "operator.leaving": "about to put the saved flag back",
    "operator.left": "the flag was put back",
    "annotate.enter": "about to annotate",
    "annotate.read": "annotate has read what was there and not yet written",
    "annotate.in": "the annotation is on",
    "annotate.leaving": "about to take it off",
    "annotate.left": "it was taken off",
    "backward.lazy": "a lazy backward compile begins (on CUDA in the autograd engine's device thread, recorded as ?)",
}


@contextmanager
def hooked(point: Point, names: Collection[str]) -> Iterator[None]:
    """Call `point(name)` at each of `names` (of POINTS), in every thread; per process, restored on exit.

    Enter it after a strategy, so that the strategy patches torch and not these hooks.
    """
    unknown = set(names) - POINTS.keys()
    if unknown:
        raise ValueError(f"expected sync points out of {', '.join(POINTS)}, got {', '.join(sorted(unknown))}")

    def at(name: str) -> None:
        if name in names:
            point(name)

    with ExitStack() as stack:
        for key, make in _HOOKS.items():
            if any(name.startswith(_GROUPS[key]) for name in names):
                stack.enter_context(replaced(key, make(resolve(key), at)))
        yield


def _trace(original: Callable[..., Any], at: Point) -> Callable[..., Any]:
    @functools.wraps(original)
    def trace(*args: Any, **options: Any) -> Any:
        at("trace.enter")
        try:
            return original(*args, **options)
        finally:
            at("trace.restored")

    return trace


def _scope(
    original: Callable[..., AbstractContextManager[Any]], at: Point, points: tuple[str, str, str, str]
) -> Callable[..., AbstractContextManager[Any]]:
    before, inside, leaving, after = points

    @contextmanager
    def scope(*args: Any, **options: Any) -> Iterator[Any]:
        at(before)
        try:
            with original(*args, **options) as value:
                at(inside)
                try:
                    yield value
                finally:
                    at(leaving)
        finally:
            at(after)

    return scope


def _patcher(original: Any, at: Point) -> Any:
    return _scope(original, at, ("trace.flagged", "trace.patcher", "trace.leaving", "trace.unpatched"))


def _operator(original: Any, at: Point) -> Any:
    return _scope(original, at, ("operator.enter", "operator.in", "operator.leaving", "operator.left"))


def _annotate(original: Any, at: Point) -> Any:
    return _scope(original, at, ("annotate.enter", "annotate.in", "annotate.leaving", "annotate.left"))


def _annotate_copy(original: Any, at: Point) -> Any:
    def copied(value: Any) -> Any:
        at("annotate.read")
        return copy.copy(value)

    return SimpleNamespace(copy=copied, deepcopy=original.deepcopy)


def _check(original: Callable[[], bool], at: Point) -> Callable[[], bool]:
    def is_fx_symbolic_tracing() -> bool:
        at("call.check")
        return original()

    return is_fx_symbolic_tracing


def _callback(original: Callable[[Any], Any], at: Point) -> Callable[[Any], Any]:
    def set_eval_frame(callback: Any) -> Any:
        if callable(callback):  # it is None or False when a call restores what was there before
            at("call.callback")
            return original(callback)
        previous = original(callback)
        at("call.restored")
        return previous

    resolve("dynamo.skip_code")(set_eval_frame.__code__)  # it is called while the callback is set
    return set_eval_frame


class _PointedLock:
    """compile_lock with sync points round it; the same lock underneath."""

    def __init__(self, lock: Any, at: Point) -> None:
        self._lock, self._at = lock, at

    def __enter__(self) -> bool:
        self._at("compile.lock")
        taken: bool = self._lock.acquire()
        self._at("compile.locked")
        return taken

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._at("compile.unlocked")

    def __repr__(self) -> str:
        return repr(self._lock)


def _lazy_backward(original: Any, at: Point) -> Any:
    def track(*args: Any, **options: Any) -> Any:
        at("backward.lazy")
        return original(*args, **options)

    return track


_HOOKS: dict[str, Callable[[Any, Point], Any]] = {
    "fx.trace": _trace,
    "fx.new_patcher": _patcher,
    "fx.is_symbolic_tracing": _check,
    "dynamo.set_eval_frame": _callback,
    "dynamo.lock": _PointedLock,
    "hop.set_env": _operator,
    "fx.annotate": _annotate,
    "fx.traceback_copy": _annotate_copy,
    "aot.track_backward": _lazy_backward,
}
_GROUPS = {
    "fx.trace": "trace.",
    "fx.new_patcher": "trace.",
    "fx.is_symbolic_tracing": "call.",
    "dynamo.set_eval_frame": "call.",
    "dynamo.lock": "compile.",
    "hop.set_env": "operator.",
    "fx.annotate": "annotate.",
    "fx.traceback_copy": "annotate.read",
    "aot.track_backward": "backward.",
}
