"""The model: exact where arithmetic gives the answer, bounded by the ideal, equal to the real queue's behaviour."""

import json
import threading
import time
from dataclasses import replace

import pytest

from dflash.errors import ConfigError
from dflash.pipeline.feed import Feed
from dflash.pipeline.placement import Layout
from dflash.pipeline.plan import main
from dflash.pipeline.simulate import Plant, best_split, ideal_tok_s, simulate

CASE = Plant(targets=5, drafters=3, target_tok_s=5200.0, drafter_tok_s=23000.0, batch_tokens=2000)


def test_a_slow_target_sets_the_pace_and_drafters_wait() -> None:
    flow = simulate(Plant(1, 1, target_tok_s=100.0, drafter_tok_s=1000.0, batch_tokens=100), steps=1000)
    assert flow.tok_s == pytest.approx(100.0, rel=2e-3)
    assert flow.bottleneck == "targets"
    assert flow.target_busy == pytest.approx(1.0, abs=2e-3)
    assert flow.drafter_busy == pytest.approx(0.1, abs=2e-3)


def test_a_slow_drafter_sets_the_pace_and_targets_wait() -> None:
    flow = simulate(Plant(1, 1, target_tok_s=1000.0, drafter_tok_s=100.0, batch_tokens=100), steps=1000)
    assert flow.tok_s == pytest.approx(100.0, rel=2e-3)
    assert flow.bottleneck == "drafters"
    assert flow.drafter_busy == pytest.approx(1.0, abs=2e-3)


def test_time_between_steps_is_lost_to_drafters() -> None:
    plant = Plant(1, 1, target_tok_s=1e6, drafter_tok_s=100.0, batch_tokens=100, sync_s=1.0)
    assert simulate(plant, steps=500).tok_s == pytest.approx(50.0, rel=1e-2)


@pytest.mark.parametrize("plant", [CASE, replace(CASE, spread=0.5), replace(CASE, queue_depth=1, accumulate=7)])
def test_nothing_flows_faster_than_the_slower_side(plant: Plant) -> None:
    assert simulate(plant).tok_s <= ideal_tok_s(plant) * 1.02  # the mean of drawn times differs a little


def test_uneven_times_cost_throughput_and_a_deeper_queue_wins_some_back() -> None:
    even = Plant(1, 1, target_tok_s=100.0, drafter_tok_s=100.0, batch_tokens=100, queue_depth=1)
    uneven = replace(even, spread=0.8)
    deep = replace(uneven, queue_depth=16)
    slow, fast = simulate(uneven, 2000).tok_s, simulate(deep, 2000).tok_s
    assert slow < 0.9 * simulate(even, 2000).tok_s
    assert fast > 1.05 * slow


def test_more_devices_of_the_slow_kind_help_and_of_the_other_do_not() -> None:
    base = simulate(CASE).tok_s
    assert simulate(replace(CASE, targets=6)).tok_s > 1.15 * base
    assert simulate(replace(CASE, drafters=4)).tok_s < 1.02 * base


def test_the_best_split_is_the_best_of_all_splits() -> None:
    best = best_split(CASE, 8)
    every = [simulate(replace(CASE, targets=8 - d, drafters=d)).tok_s for d in range(1, 8)]
    assert simulate(best).tok_s == max(every)
    assert best.targets > CASE.targets


def real_run(plant: Plant, steps: int) -> float:
    """Seconds that the real queue takes with threads that sleep as long as the model's devices compute."""
    feed = Feed[int](plant.queue_depth, plant.targets, plant.drafters)
    numbers, lock = iter(range(steps * plant.step_batches)), threading.Lock()
    barrier = threading.Barrier(plant.drafters)

    def target() -> None:
        with feed.producing():
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                time.sleep(plant.batch_tokens / plant.target_tok_s)
                feed.put(number, number)

    def drafter(which: int) -> None:
        with feed.consuming():
            for step in range(steps):
                for number in Layout(plant.step_batches, plant.drafters).share(which):
                    feed.take(step * plant.step_batches + number)
                    time.sleep(plant.batch_tokens / plant.drafter_tok_s)
                barrier.wait(20)

    threads = [threading.Thread(target=target, daemon=True) for _ in range(plant.targets)]
    threads += [threading.Thread(target=drafter, args=(d,), daemon=True) for d in range(plant.drafters)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return time.perf_counter() - began


@pytest.mark.parametrize(
    "plant",
    [
        Plant(3, 2, target_tok_s=20.0, drafter_tok_s=40.0, batch_tokens=1, queue_depth=2),
        Plant(1, 3, target_tok_s=40.0, drafter_tok_s=10.0, batch_tokens=1, queue_depth=2, accumulate=5),
        Plant(2, 1, target_tok_s=25.0, drafter_tok_s=20.0, batch_tokens=1, queue_depth=1),
    ],
)
def test_the_model_predicts_the_real_queue(plant: Plant) -> None:
    steps = 40 // plant.step_batches
    # sleeps of 25 ms and more: a busy machine adds little to them, and never takes any away
    expected = simulate(plant, steps).seconds
    assert expected * 0.98 < real_run(plant, steps) < expected * 1.6


def test_a_model_without_the_queue_would_not_predict_it() -> None:
    plant = Plant(1, 1, target_tok_s=20.0, drafter_tok_s=20.0, batch_tokens=1)
    in_turn = 20 / plant.target_tok_s + 20 / plant.drafter_tok_s
    assert real_run(plant, 20) < 0.8 * in_turn


def test_the_verb_names_the_side_that_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--targets", "5", "--drafters", "3", "--target-tok-s", "5200", "--drafter-tok-s", "23000"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "waits for its targets; the next device to buy is a target" in text
    assert main([*words, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["as asked"]["bottleneck"] == "targets"
    assert read["ideal_tok_s"] == 26000.0


@pytest.mark.parametrize(
    ("name", "value"), [("targets", "0"), ("target-tok-s", "-1"), ("spread", "-0.1"), ("accumulate", "2")]
)
def test_impossible_plans_are_one_line(name: str, value: str) -> None:
    words = ["--targets", "5", "--drafters", "3", "--target-tok-s", "5200", "--drafter-tok-s", "23000"]
    with pytest.raises(ConfigError, match=f"^--{name}: expected"):
        main([*words, f"--{name}", value])
