"""What target threads and drafter threads do: claim, compute, deliver; wait for the step, take, compute, report."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dflash.pipeline.crew import named_in_errors
from dflash.pipeline.feed import Feed

Batch = TypeVar("Batch")
Work = TypeVar("Work")
Done = TypeVar("Done")


@dataclass(frozen=True)
class Claim(Generic[Batch]):
    """A micro-batch that one target thread has taken on; numbers count over the whole pipeline, in the data's order."""

    number: int
    batch: Batch


class Claims(Generic[Batch]):
    """Hands out the micro-batches of a stream, in order, to whichever thread asks."""

    def __init__(self, batches: Iterator[Batch], count: int) -> None:
        """At most `count` of them."""
        self._batches, self._count, self._number = batches, count, 0
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def next(self) -> Claim[Batch] | None:
        """The next one; none at the end. An error of the stream is raised for every caller from then on."""
        with self._lock:
            if self._error is not None:
                # a generator that has raised would look as if it had come to its end
                raise self._error
            if self._number >= self._count:
                return None
            try:
                batch = next(self._batches, None)
            except Exception as error:
                self._error = error
                raise
            if batch is None:
                self._count = self._number
                return None
            self._number += 1
            return Claim(self._number - 1, batch)


class TargetWorker(Generic[Batch, Work]):
    """Turns claims into work. Its state outlives its thread: the next one goes on with the claim that died."""

    def __init__(
        self,
        claims: Claims[Batch],
        feed: Feed[Work],
        compute: Callable[[Claim[Batch]], Work],
        identify: Callable[[Batch], str],
        settle: Callable[[Work], None] | None = None,
    ) -> None:
        """settle: waits until a device has finished the work; it is called when the next one is already under way.

        So the device never runs dry, and what lies in the feed is ready: its waiting times mean something. None: the
        work is finished when `compute` returns.
        """
        self._claims, self._feed, self._compute = claims, feed, compute
        self._identify, self._settle = identify, settle
        self._claim: Claim[Batch] | None = None
        self._unsettled: tuple[int, Work] | None = None

    def run(self) -> None:
        """Until the claims end. FeedClosed: the pipeline ends."""
        while (claim := self._claim or self._claims.next()) is not None:
            self._claim = claim
            with named_in_errors(lambda batch=claim.batch: self._note(batch)):  # type: ignore[misc]
                work = self._compute(claim)
            self._deliver_unsettled()
            self._unsettled, self._claim = (claim.number, work), None
            if self._settle is None:
                self._deliver_unsettled()
        self._deliver_unsettled()

    def _deliver_unsettled(self) -> None:
        if self._unsettled is None:
            return
        number, work = self._unsettled
        if self._settle is not None:
            self._settle(work)
        self._feed.put(number, work)
        self._unsettled = None

    def _note(self, batch: Batch) -> str:
        return f"in {threading.current_thread().name}, {self._identify(batch)}"


@dataclass(frozen=True)
class Seat:
    """One drafter thread's place: number `which` of `count`; `share`: its micro-batches' numbers within a step."""

    which: int
    count: int
    share: Sequence[int]
    # micro-batches a step, of all drafters
    step_size: int

    def numbers(self, step: int) -> list[int]:
        """Numbers of the micro-batches of a step (from 0) that this drafter computes."""
        return [step * self.step_size + index for index in self.share]


class DrafterWorker(Generic[Work, Done]):
    """Computes its share of every step: waits for the weights, takes its micro-batches in order, reports."""

    def __init__(
        self,
        seat: Seat,
        go: Feed[None],
        feed: Feed[Work],
        done: Feed[Done],
        compute: Callable[[Iterator[Work]], Done],
    ) -> None:
        """`go` number step * count + which: the weights are ready; `done` the same number: the share is computed."""
        self._seat, self._go, self._feed, self._done, self._compute = seat, go, feed, done, compute

    def run(self, steps: int) -> None:
        """All `steps` steps. FeedClosed: the pipeline ends."""
        for step in range(steps):
            number = step * self._seat.count + self._seat.which
            self._go.take(number)
            self._done.put(number, self._compute(map(self._feed.take, self._seat.numbers(step))))
