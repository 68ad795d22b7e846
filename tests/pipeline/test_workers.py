"""Threads with fake devices: order, restarts, failures at every point, nobody left behind."""

import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from dflash.pipeline.crew import Crew
from dflash.pipeline.feed import Feed, FeedClosed
from dflash.pipeline.workers import Claim, Claims, DrafterWorker, Seat, TargetWorker

LIMIT_S = 5.0


class Line:
    """A pipeline of numbers: targets multiply by ten, drafters add up, the main thread collects sums by step."""

    def __init__(
        self,
        targets: int,
        drafters: int,
        *,
        steps: int = 6,
        step_size: int = 3,
        restarts: int = 0,
        target: Callable[[int], int] = lambda batch: batch * 10,
        drafter: Callable[[int], int] = lambda work: work,
        source: Callable[[], Iterator[int]] | None = None,
    ) -> None:
        self.steps, self.drafters = steps, drafters
        self.feed = Feed[int](2, targets, drafters)
        self.go, self.done = Feed[None](drafters, 1, drafters), Feed[list[int]](drafters, drafters, 1)
        self.crew = Crew(self.close, restarts)
        stream = source() if source else iter(range(steps * step_size))
        claims = Claims(stream, steps * step_size)
        for index in range(targets):
            worker = TargetWorker(claims, self.feed, lambda claim: target(claim.batch), lambda batch: f"batch {batch}")
            name = f"target-{index}"
            self.crew.start(name, worker.run, restartable=True, at_end=self.feed.leave_producer)
        for index in range(drafters):
            seat = Seat(index, drafters, range(index, step_size, drafters), step_size)
            drafting = DrafterWorker(
                seat, self.go, self.feed, self.done, lambda works: [drafter(work) for work in works]
            )
            self.crew.start(f"drafter-{index}", lambda d=drafting: d.run(steps), at_end=self.feed.leave_consumer)  # type: ignore[misc]

    def close(self, error: BaseException | None) -> None:
        for feed in (self.feed, self.go, self.done):
            feed.close(error)

    def run(self) -> list[list[int]]:
        """What each step's drafters computed, in the order of their numbers."""
        try:
            collected = []
            for step in range(self.steps):
                for index in range(self.drafters):
                    self.go.put(step * self.drafters + index, None)
                shares = [self.done.take(step * self.drafters + index) for index in range(self.drafters)]
                collected.append(list(chain.from_iterable(shares)))
        except FeedClosed:
            self.crew.check()
            raise
        finally:
            assert self.crew.join() == []
        return collected


def no_thread_left() -> bool:
    return not [t for t in threading.enumerate() if t.name.startswith(("target-", "drafter-"))]


@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 1), (3, 1), (2, 3), (4, 2)])
def test_every_step_gets_its_own_batches_whatever_the_number_of_threads(targets: int, drafters: int) -> None:
    delays = random.Random(1)

    def slow(batch: int) -> int:
        time.sleep(delays.random() * 2e-3)
        return batch * 10

    collected = Line(targets, drafters, target=slow).run()
    assert [sorted(step) for step in collected] == [[30 * s, 30 * s + 10, 30 * s + 20] for s in range(6)]
    if drafters == 1:
        assert collected == [[30 * s, 30 * s + 10, 30 * s + 20] for s in range(6)], "in order, too"
    assert no_thread_left()


class Broken(Exception):
    """An error of the test's own."""


def failing(at: int, times: int = 1, error: BaseException | None = None) -> Callable[[int], int]:
    """Fails when it meets `at`, that many times."""
    left, lock = [times], threading.Lock()

    def call(value: int) -> int:
        with lock:
            if value == at and left[0] > 0:
                left[0] -= 1
                raise error or Broken("boom")
        return value

    return call


@pytest.mark.parametrize("at", [0, 7, 17])
@pytest.mark.parametrize("where", ["target", "drafter"])
@pytest.mark.parametrize(("targets", "drafters"), [(1, 1), (2, 3)])
def test_a_failure_anywhere_stops_all_in_time_and_is_raised_with_its_own_traceback(
    where: str, at: int, targets: int, drafters: int
) -> None:
    line = Line(targets, drafters, **{where: failing(at if where == "target" else at * 10)})  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(Broken, match="boom") as caught:
        line.run()
    assert time.monotonic() - began < LIMIT_S
    assert no_thread_left()
    assert "raise error or Broken" in "".join(traceback.format_exception(caught.value))
    if where == "target":
        assert any(f"batch {at}" in note and "target-" in note for note in caught.value.__notes__)


def test_a_failure_of_the_data_stream_reaches_the_main_thread_once() -> None:
    def stream() -> Iterator[int]:
        yield from range(4)
        raise Broken("a bad line")

    with pytest.raises(Broken, match="a bad line"):
        Line(3, 2, source=stream).run()
    assert no_thread_left()


def test_a_data_stream_that_failed_does_not_look_finished_to_a_restarted_thread() -> None:
    def stream() -> Iterator[int]:
        yield 0
        raise Broken("a bad line")

    line = Line(1, 1, source=stream, restarts=2)
    with pytest.raises(Broken, match="a bad line"):
        line.run()
    assert len(line.crew.restarted) == 2


@pytest.mark.parametrize("error", [Broken("boom"), SystemExit(1)])
@pytest.mark.parametrize("targets", [1, 3])
def test_a_dead_target_thread_is_replaced_and_nothing_is_lost_or_repeated(targets: int, error: BaseException) -> None:
    line = Line(targets, 2, restarts=1, target=failing(8, 1, error), drafter=lambda work: work)
    collected = line.run()
    assert sorted(chain.from_iterable(collected)) == list(range(18))
    assert len(line.crew.restarted) == 1
    assert type(error).__name__ in line.crew.restarted[0]
    assert no_thread_left()


def test_more_deaths_than_restarts_end_the_run() -> None:
    line = Line(2, 1, restarts=2, target=failing(8, 3))
    with pytest.raises(Broken):
        line.run()
    assert len(line.crew.restarted) == 2
    assert no_thread_left()


def test_drafter_threads_are_not_restarted() -> None:
    line = Line(1, 2, restarts=5, drafter=failing(40))
    with pytest.raises(Broken):
        line.run()
    assert line.crew.restarted == []


def test_a_thread_that_does_not_end_is_named() -> None:
    release = threading.Event()
    crew = Crew(lambda error: None)
    crew.start("target-9", lambda: [None, release.wait(20)][0])
    assert crew.join(0.1) == ["target-9"]
    release.set()
    assert crew.join() == []


def test_work_of_a_device_is_delivered_while_the_next_is_under_way() -> None:
    events: list[str] = []
    feed = Feed[int](9)

    def compute(claim: Claim[int]) -> int:
        events.append(f"launch {claim.batch}")
        return claim.batch

    TargetWorker(Claims(iter(range(3)), 3), feed, compute, str, settle=lambda work: events.append(f"done {work}")).run()
    assert events == ["launch 0", "launch 1", "done 0", "launch 2", "done 1", "done 2"]
    assert [feed.take(number) for number in range(3)] == [0, 1, 2]


def test_work_under_way_survives_the_death_of_its_thread() -> None:
    feed, settled, fails = Feed[int](9), list[int](), failing(2)

    worker = TargetWorker(Claims(iter(range(4)), 4), feed, lambda claim: fails(claim.batch), str, settle=settled.append)
    with pytest.raises(Broken):
        worker.run()
    worker.run()
    assert [feed.take(number) for number in range(4)] == [0, 1, 2, 3]
    assert settled == [0, 1, 2, 3]
