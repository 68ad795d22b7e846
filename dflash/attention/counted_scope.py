"""A change to the process that several threads need at the same time: made once, undone by the last to leave."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class CountedScope:
    """Enters a context manager with the first of any threads' scopes and leaves it with the last."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._scopes = 0
        self._entered = ExitStack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One scope of one thread; scopes may overlap in any order."""
        with self._lock:
            if self._scopes == 0:
                with ExitStack() as stack:
                    stack.enter_context(self._make())
                    self._entered = stack.pop_all()
            self._scopes += 1
        try:
            yield
        finally:
            with self._lock:
                self._scopes -= 1
                if self._scopes == 0:
                    self._entered.close()
