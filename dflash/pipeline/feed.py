"""A bounded queue whose items are taken in the order of their numbers, whoever was first; never waits for the dead."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash.errors import DflashError

Item = TypeVar("Item")


class FeedClosed(DflashError):
    """Nothing more comes or goes; `__cause__` is the error that closed the feed, if one did."""


@dataclass(frozen=True)
class FeedStats:
    """Sums since the feed was made; seconds add up over the threads of a side."""

    # items that wait to be taken now, and the largest number that ever did
    queued: int
    peak: int
    taken: int
    # time producers waited for room, and consumers for their item
    put_wait_s: float
    take_wait_s: float


class Feed(Generic[Item]):
    """Items numbered from `start`. Number i may be put once all numbers up to i - depth are taken.

    Any number of producers and consumers; each number is put once and taken once. The oldest number always has room,
    so producers that claim numbers in order cannot block each other.
    """

    def __init__(self, depth: int, producers: int = 1, consumers: int = 1, start: int = 0) -> None:
        """`depth`: most items in the queue; `producers`, `consumers`: how many threads will enter either side."""
        assert depth >= 1
        self.depth = depth
        self._producers, self._consumers = producers, consumers
        self._items: dict[int, Item] = {}
        # all numbers below _base are taken, and those in _taken
        self._base, self._taken = start, set[int]()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._peak = self._count = 0
        self._put_wait_s = self._take_wait_s = 0.0

    def put(self, index: int, item: Item) -> None:
        """Adds item number `index` when there is room. FeedClosed: closed, or no consumer is left."""
        with self._changed:
            assert not self._is_taken(index), "put twice"
            assert index not in self._items, "put twice"
            try:
                waited_s = self._wait(lambda: index < self._base + self.depth, self._no_consumer)
            except FeedClosed as closed:
                raise closed from self._error
            # not `+= self._wait(...)`: the sum would be read before the wait, in which other threads add to it
            self._put_wait_s += waited_s
            self._items[index] = item
            self._peak = max(self._peak, len(self._items))
            self._changed.notify_all()

    def take(self, index: int) -> Item:
        """Item number `index` once it is there. FeedClosed: closed before it came, or no producer is left."""
        with self._changed:
            assert not self._is_taken(index), "taken twice"
            try:
                waited_s = self._wait(lambda: index in self._items, self._no_producer)
            except FeedClosed as closed:
                raise closed from self._error
            self._take_wait_s += waited_s
            self._taken.add(index)
            while self._base in self._taken:
                self._taken.remove(self._base)
                self._base += 1
            self._count += 1
            self._changed.notify_all()
            return self._items.pop(index)

    def close(self, error: BaseException | None = None) -> None:
        """Wakes all who wait, drops what is queued; the first error given stays the cause."""
        with self._changed:
            self._error = self._error or error
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @contextmanager
    def producing(self) -> Iterator[None]:
        """Round all that one producer does; when the last one has left, consumers no longer wait."""
        try:
            yield
        finally:
            self.leave_producer()

    @contextmanager
    def consuming(self) -> Iterator[None]:
        """Round all that one consumer does; when the last one has left, producers no longer wait."""
        try:
            yield
        finally:
            self.leave_consumer()

    def leave_producer(self) -> None:
        """One producer fewer, for good."""
        with self._changed:
            self._producers -= 1
            self._changed.notify_all()

    def leave_consumer(self) -> None:
        """One consumer fewer, for good."""
        with self._changed:
            self._consumers -= 1
            self._changed.notify_all()

    def stats(self) -> FeedStats:
        """What has happened so far."""
        with self._changed:
            return FeedStats(len(self._items), self._peak, self._count, self._put_wait_s, self._take_wait_s)

    def _is_taken(self, index: int) -> bool:
        return index < self._base or index in self._taken

    def _no_consumer(self) -> str | None:
        return "the last consumer has left" if self._consumers <= 0 else None

    def _no_producer(self) -> str | None:
        return "the last producer has left" if self._producers <= 0 else None

    def _wait(self, ready: Callable[[], bool], hopeless: Callable[[], str | None]) -> float:
        """Seconds until `ready`; the lock is held on entry and exit."""
        began = time.perf_counter()
        while True:
            if self._closed:
                raise FeedClosed("the feed is closed")
            if ready():
                return time.perf_counter() - began
            if (reason := hopeless()) is not None:
                raise FeedClosed(reason)
            self._changed.wait()
