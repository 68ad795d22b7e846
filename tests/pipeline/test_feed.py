"""The ordered queue: order, bound, waits, and that nobody waits for a side that is gone."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from dflash.pipeline.feed import Feed, FeedClosed

LIMIT_S = 10


def started(*bodies: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def outcome_of(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs `call` in a thread; what it returned or raised appears in the list."""
    results: list[object] = []

    def body() -> None:
        try:
            results.append(call())
        except FeedClosed as closed:
            results.append(closed)

    return started(body)[0], results


def waits(thread: threading.Thread) -> bool:
    thread.join(0.1)
    return thread.is_alive()


@pytest.mark.parametrize(("producers", "consumers", "depth"), [(1, 1, 1), (3, 1, 2), (2, 3, 1), (4, 4, 3)])
def test_every_item_is_taken_once_in_order_whatever_the_number_of_threads(
    producers: int, consumers: int, depth: int
) -> None:
    total, feed = 120, Feed[int](depth, producers, consumers)
    numbers, lock = iter(range(total)), threading.Lock()
    taken: list[list[int]] = [[] for _ in range(consumers)]

    def produce() -> None:
        delays = random.Random(threading.get_ident())
        with feed.producing():
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                time.sleep(delays.random() * 2e-4)
                feed.put(number, number * 10)

    def consume(which: int) -> None:
        with feed.consuming():
            for number in range(which, total, consumers):
                taken[which].append(feed.take(number))

    joined(started(*[produce] * producers, *[lambda which=which: consume(which) for which in range(consumers)]))
    for which in range(consumers):
        assert taken[which] == [number * 10 for number in range(which, total, consumers)]
    stats = feed.stats()
    assert (stats.taken, stats.queued) == (total, 0)
    assert stats.peak <= depth


def test_a_put_beyond_the_depth_waits_until_the_oldest_item_is_taken() -> None:
    feed = Feed[str](2)
    feed.put(1, "b")  # out of order, inside the window
    thread, results = outcome_of(lambda: feed.put(2, "c"))
    assert waits(thread)
    feed.put(0, "a")
    assert feed.take(1) == "b"
    assert waits(thread), "the window moves with the oldest item, not with any"
    assert feed.take(0) == "a"
    joined([thread])
    assert results == [None]
    assert feed.take(2) == "c"


@pytest.mark.parametrize("error", [None, ValueError("target broke")])
def test_closing_wakes_both_sides_and_tells_them_why(error: Exception | None) -> None:
    feed = Feed[int](1)
    feed.put(0, 0)
    waiting = [outcome_of(lambda: feed.put(1, 1)), outcome_of(lambda: feed.take(5))]
    assert all(waits(thread) for thread, _ in waiting)
    feed.close(error)
    feed.close(KeyError("later"))
    joined([thread for thread, _ in waiting])
    for _, results in waiting:
        assert isinstance(results[0], FeedClosed)
    with pytest.raises(FeedClosed) as later:
        feed.take(0)
    cause = later.value.__cause__
    assert isinstance(cause, KeyError) if error is None else cause is error
    with pytest.raises(FeedClosed):
        feed.put(3, 3)


def test_consumers_stop_waiting_when_the_last_producer_leaves_and_not_before() -> None:
    feed = Feed[int](4, producers=2)
    thread, results = outcome_of(lambda: feed.take(1))
    with feed.producing():
        feed.put(0, 7)
    assert waits(thread)
    with feed.producing():
        pass
    joined([thread])
    assert isinstance(results[0], FeedClosed)
    assert "producer" in str(results[0])
    assert feed.take(0) == 7, "what was delivered can still be taken"


def test_producers_stop_waiting_when_the_last_consumer_dies() -> None:
    feed = Feed[int](1)
    feed.put(0, 0)
    thread, results = outcome_of(lambda: feed.put(1, 1))
    assert waits(thread)

    def dies() -> None:
        with feed.consuming():
            raise RuntimeError("dead")

    with pytest.raises(RuntimeError, match="dead"):
        dies()
    joined([thread])
    assert isinstance(results[0], FeedClosed)


def test_the_side_that_waits_is_the_side_whose_time_grows() -> None:
    slow_consumer, slow_producer = Feed[int](1), Feed[int](1)

    def run(feed: Feed[int], produce_s: float, consume_s: float) -> None:
        def produce() -> None:
            for number in range(8):
                time.sleep(produce_s)
                feed.put(number, number)

        threads = started(produce)
        for number in range(8):
            feed.take(number)
            time.sleep(consume_s)
        joined(threads)

    run(slow_consumer, 0.0, 0.02)
    run(slow_producer, 0.02, 0.0)
    assert slow_consumer.stats().put_wait_s > 3 * slow_consumer.stats().take_wait_s
    assert slow_producer.stats().take_wait_s > 3 * slow_producer.stats().put_wait_s


def test_waits_of_several_threads_at_once_all_count() -> None:
    feed = Feed[int](4, producers=1, consumers=4)
    threads = started(*[lambda number=number: feed.take(number) for number in range(4)])  # type: ignore[misc]
    time.sleep(0.3)
    for number in range(4):
        feed.put(number, number)
    joined(threads)
    # each of the four has waited for most of that time; of one alone it would be a quarter
    assert feed.stats().take_wait_s > 0.6


def test_a_number_is_put_once_and_taken_once() -> None:
    feed = Feed[int](3)
    feed.put(0, 0)
    feed.put(1, 1)
    feed.take(0)
    with pytest.raises(AssertionError, match="put twice"):
        feed.put(1, 1)
    with pytest.raises(AssertionError, match="put twice"):
        feed.put(0, 0)
    with pytest.raises(AssertionError, match="taken twice"):
        feed.take(0)
