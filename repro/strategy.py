"""Puts a strategy of `dflash.attention` in force in this process, by name, for the bodies that run in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Scope = Callable[[object], AbstractContextManager[object]]


class UnknownStrategy(ValueError):
    """A strategy name that `dflash.attention` does not have."""


@contextmanager
def in_force(name: str | None) -> Iterator[Scope]:
    """Yields the scope that a body enters, in any thread, round each step (trace, mask build, compile, compiled call).

    None: no strategy, the scope does nothing. Per process: whatever the strategy patches is restored at the end.
    A key that never came before (`object()`) is a cold step. Raises UnknownStrategy.
    """
    if name is None:
        yield nullcontext
        return
    strategy = _made(name)
    with strategy.thread_scope():
        yield lambda key: _step(strategy, key)


@contextmanager
def _step(strategy: Any, key: object) -> Iterator[None]:
    with strategy.thread_scope(), strategy.step_scope(key):
        yield


def _made(name: str) -> Any:
    try:
        strategies = importlib.import_module("dflash.attention").STRATEGIES
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnknownStrategy(
            f"strategy {name!r}: expected dflash.attention.STRATEGIES, got {error}; run without --strategy"
        ) from error
    if name not in strategies:
        raise UnknownStrategy(
            f"strategy {name!r}: expected one of {', '.join(sorted(strategies))}; choose one of these"
        )
    return strategies[name]()
