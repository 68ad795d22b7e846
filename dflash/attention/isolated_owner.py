"""Who is tracing: the thread that holds dynamo's compile_lock, and autograd's threads while they work for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from probes.torch_internals import UnsupportedTorch, compile_lock, stash, stashed

_KEY = "dflash.attention.isolated"
Annotation = Callable[[], AbstractContextManager[None]]


class _Trace:
    """One trace in progress. Autograd copies the reference to its own threads and may keep it: `active` ends it."""

    def __init__(self) -> None:
        self.active = True


class Owner:
    """Tells the one thread that traces or compiles from all others.

    A trace's backward runs its nodes in autograd's device threads while the tracing thread, which holds compile_lock,
    waits for them. Such a node may trace too (flex's joint graph does): it must pass, not wait for the lock.
    """

    def __init__(self) -> None:
        self._lock = compile_lock()
        if not hasattr(self._lock, "_is_owned"):
            raise UnsupportedTorch("a compile_lock that knows its owner (RLock)", type(self._lock).__name__)
        self._thread = threading.local()

    def is_me(self) -> bool:
        """Whether the calling thread traces or compiles, or works for the thread that does."""
        return bool(self._lock._is_owned()) or _for_a_trace()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until nobody else traces or compiles, and keeps it so. Re-entrant."""
        if _for_a_trace():
            yield
            return
        with self._lock, _handed_on(), ExitStack() as stack:
            for annotation in self._pending():
                stack.enter_context(annotation())
            yield

    @contextmanager
    def when_tracing(self, annotation: Annotation) -> Iterator[None]:
        """Keeps an annotation of this thread for the traces that it begins inside; no other thread's trace sees it."""
        pending = self._pending()
        pending.append(annotation)
        try:
            yield
        finally:
            pending.remove(annotation)

    def _pending(self) -> list[Annotation]:
        if not hasattr(self._thread, "pending"):
            self._thread.pending = []
        pending: list[Annotation] = self._thread.pending
        return pending


def _for_a_trace() -> bool:
    trace = stashed(_KEY)
    return isinstance(trace, _Trace) and trace.active


@contextmanager
def _handed_on() -> Iterator[None]:
    """This thread's backward passes tell autograd's threads that they work for a trace."""
    trace = _Trace()
    stash(_KEY, trace)
    try:
        yield
    finally:
        trace.active = False
        stash(_KEY, None)
