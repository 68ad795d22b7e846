"""Counts how often code that inductor generated really ran: a strategy that quietly runs uncompiled shows as 0."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from probes.torch_internals import replaced, resolve


class Count:
    """A number that any thread may raise."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._reads = 0

    def add(self) -> None:
        """One more; a single step of the interpreter, so no lock."""
        next(self._next)

    def value(self) -> int:
        """How many so far. One reader: each reading takes a number of its own, which it subtracts."""
        self._reads += 1
        return next(self._next) - (self._reads - 1)


@contextmanager
def counted_compiled_calls() -> Iterator[Count]:
    """Counts runs of compiled graphs, forward and backward alike, in all threads; patches inductor for the process."""
    original: Callable[..., Any] = resolve("inductor.run_compiled")
    count = Count()

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        count.add()
        return original(*args, **kwargs)

    with replaced("inductor.run_compiled", run):
        yield count
