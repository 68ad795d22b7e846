"""What isolation changes in torch: one context manager a fault, each per process, each restored when it ends."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dflash.attention.isolated_owner import Owner
from probes.torch_internals import available, fx_flag_is_per_thread, redirected, replaced, resolve

Patch = AbstractContextManager[object]


def patches(owner: Owner) -> list[Patch]:
    """The patches that the installed torch needs, outermost first; UnsupportedTorch where a name is gone."""
    needed: list[Patch] = [
        _one_at_a_time("fx.trace", owner),
        _one_at_a_time("fx.make_fx_trace", owner),
        _session_of_its_own("export.session", owner),
        _modules_of_the_owner(owner),
        _annotations_of_the_owner(owner),
        _true_for_the_owner("compiler.is_compiling", owner),
        _true_for_the_owner("compiler.is_exporting", owner),
    ]
    if available("compiler.session"):
        needed.append(_session_of_its_own("compiler.session", owner))
    if not fx_flag_is_per_thread():
        needed += [
            _true_for_the_owner("fx.is_symbolic_tracing", owner),
            _true_for_the_owner("fx.is_tracing", owner),
            _one_environment_at_a_time(owner),
        ]
    return needed


@contextmanager
def _one_at_a_time(key: str, owner: Owner) -> Iterator[None]:
    """A tracing method runs under compile_lock: no two traces, no trace beside a compile (FXSTUCK-A, PATCHREVERT).

    make_fx is covered as a whole, because it publishes its tracer for the process before its Tracer starts.
    """
    original = resolve(key)

    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        with owner.alone():
            return original(*args, **kwargs)

    with replaced(key, trace):
        yield


def _session_of_its_own(key: str, owner: Owner) -> AbstractContextManager[None]:
    """A scope that sets is_compiling for the process runs under compile_lock, so ends before the next begins."""

    def under_the_lock(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def session(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with owner.alone(), original(*args, **kwargs) as value:
                yield value

        return session

    return redirected(resolve(key), under_the_lock)


def _true_for_the_owner(key: str, owner: Owner) -> AbstractContextManager[None]:
    """A question about the process's flag is answered True only to the thread that set it (FXFLAG, ISCOMPILING)."""

    def asked(original: Callable[..., Any]) -> Callable[..., Any]:
        def answer() -> bool:
            return bool(original()) and owner.is_me()

        return answer

    return redirected(resolve(key), asked)


@contextmanager
def _one_environment_at_a_time(owner: Owner) -> Iterator[None]:
    """An eager higher-order operator's scope, which saves and restores the flag, runs under compile_lock (FXSTUCK-B).

    Under the lock the flag it saves is its own thread's. Cost: uncompiled flex, cond and while_loop run one at a time.
    """
    original = resolve("hop.set_env")

    @contextmanager
    def set_env(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with owner.alone(), original(*args, **kwargs) as value:
            yield value

    with replaced("hop.set_env", set_env):
        yield


@contextmanager
def _modules_of_the_owner(owner: Owner) -> Iterator[None]:
    """A trace's wrappers of nn.Module act in the tracing thread only; others run the module (GRAPHCORRUPT)."""
    original = resolve("fx.patch_method")

    @functools.wraps(original)
    def patch_method(patcher: Any, cls: type, name: str, new_fn: Callable[..., Any], deduplicate: bool = True) -> None:
        if cls is torch.nn.Module:
            new_fn = _for_the_owner(new_fn, getattr(cls, name), owner)
        original(patcher, cls, name, new_fn, deduplicate)

    with replaced("fx.patch_method", patch_method):
        yield


def _for_the_owner(traced: Callable[..., Any], untraced: Callable[..., Any], owner: Owner) -> Callable[..., Any]:
    @functools.wraps(traced)
    def call(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if owner.is_me() else untraced(*args, **kwargs)

    return call


def _annotations_of_the_owner(owner: Owner) -> AbstractContextManager[None]:
    """`fx.traceback.annotate` writes the process's metadata only while its own thread traces (ANNOTATE, CACHEPOISON).

    Elsewhere it waits for a trace that its thread begins inside it, as in `with annotate(...): make_fx(f)(x)`.
    """

    def owned(original: Callable[..., Any]) -> Callable[..., Any]:
        def annotate(annotation: dict[str, Any]) -> AbstractContextManager[None]:
            scope: AbstractContextManager[None] = original(annotation)
            return scope if owner.is_me() else owner.when_tracing(lambda: original(annotation))

        return annotate

    return redirected(resolve("fx.annotate"), owned)
