"""Notes each frame that dynamo compiles in the hold of the step in which it happens, with torch's own reason."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dflash.attention.counted_scope import CountedScope
from dflash.attention.gate import current_hold
from probes.torch_internals import replaced, resolve


@contextmanager
def _watched() -> Iterator[None]:
    original: Callable[..., Any] = resolve("dynamo.compile_frame")
    metrics: Callable[[], list[Any]] = resolve("dynamo.metrics")

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            hold = current_hold()
            if hold is not None:
                hold.compiles.append(_reason(metrics()))

    with replaced("dynamo.compile_frame", compile_frame):
        yield


def _reason(metrics: list[Any]) -> str:
    """Of the newest compile, which is the calling thread's: it still holds compile_lock."""
    return in_words(metrics[-1]) if metrics else "unknown"


def newest_compiles(count: int) -> list[str]:
    """The last `count` compiles of the process in words, oldest first (dynamo remembers 64)."""
    metrics: list[Any] = resolve("dynamo.metrics")()
    return [in_words(entry) for entry in metrics[len(metrics) - count :]] if count else []


def in_words(entry: Any) -> str:
    """Function and reason of one compile, from dynamo's metrics of it."""
    why = entry.recompile_reason or "first compile with these inputs"
    return f"{entry.co_name}: {' '.join(str(why).split())}"


_WATCH = CountedScope(_watched)


def watched_compiles() -> AbstractContextManager[None]:
    """While any thread is inside, compiles are noted in `Hold.compiles`; observes, changes no result. Per process."""
    return _WATCH.entered()
