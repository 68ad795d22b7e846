"""The threads of a pipeline: the first failure stops all and is raised as it was, with the batch it came from."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash.errors import DflashError
from dflash.pipeline.feed import FeedClosed

# seconds in which every thread must have ended once it is told to
JOIN_S = 5.0


class ThreadDied(DflashError):
    """A thread was ended by something that is no error (SystemExit); `__cause__` is what it was. Exit code 1."""


class StillRunning(DflashError):
    """A thread did not end in time; the message names it. Exit code 1."""


def nothing() -> None:
    """What there is to do when a thread ends that nobody counts on."""


class Crew:
    """Starts threads, keeps the first failure, joins. `close(error)` must wake every thread that waits."""

    def __init__(self, close: Callable[[BaseException | None], None], restarts: int = 0) -> None:
        """`restarts`: how many deaths of restartable threads are made good, over all of them."""
        self._close = close
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self.restarts_left = restarts
        # one line a thread that was replaced
        self.restarted: list[str] = []
        self.failure: BaseException | None = None

    def start(
        self, name: str, body: Callable[[], None], *, restartable: bool = False, at_end: Callable[[], None] = nothing
    ) -> None:
        """Runs `body` in a thread of that name; `at_end` when it has ended for good, whatever ended it.

        restartable: after an exception `body` is run again, from the start, by a new thread.
        """

        def run() -> None:
            try:
                body()
            except BaseException as error:  # noqa: BLE001 - whatever ends a thread ends the run
                if restartable and self._may_restart(name, error):
                    self.start(name, body, restartable=True, at_end=at_end)
                    return
                self.fail(_as_failure(error, name))
            at_end()

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and wakes all threads; later ones follow from it."""
        with self._lock:
            if self.failure is None and not self._ended:
                self.failure = error
        self._close(error)

    def check(self) -> None:
        """Raises the first failure of any thread, with its own traceback."""
        if self.failure is not None:
            raise self.failure

    def join(self, timeout_s: float = JOIN_S) -> list[str]:
        """Ends all threads: closes what they wait for, then waits. The names of those that have not ended."""
        with self._lock:
            self._ended = True
        self._close(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _may_restart(self, name: str, error: BaseException) -> bool:
        with self._lock:
            over = self._ended or self.failure is not None or isinstance(error, FeedClosed)
            if over or self.restarts_left == 0:
                return False
            self.restarts_left -= 1
            self.restarted.append(f"{name}: {type(error).__name__}: {error}")
            return True


def _as_failure(error: BaseException, name: str) -> BaseException:
    if isinstance(error, FeedClosed):
        # the consequence of another failure, or of the end of the run
        return error.__cause__ or error
    if isinstance(error, Exception):
        return error
    # raised in the main thread, it would end the process without a word
    died = ThreadDied(f"{name} was ended by {error!r}")
    died.__cause__ = error
    return died


@contextmanager
def named_in_errors(what: Callable[[], str]) -> Iterator[None]:
    """Adds a note with `what()` to an error that passes; the error and its traceback stay as they are."""
    try:
        yield
    except FeedClosed:
        raise
    except Exception as error:
        error.add_note(what())
        raise
