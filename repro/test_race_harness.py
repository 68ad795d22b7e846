"""The harness itself: it orders threads, sees locks and deadlocks, replays, enumerates, and survives its children."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import repro.bodies
from repro.child import run_child
from repro.fork import in_fork
from repro.points import hooked
from repro.rates import Rate
from repro.schedule import Run, Scheduler, explore

pytestmark = [pytest.mark.race, pytest.mark.timeout(300)]


def two_counters(log: list[str], points: int = 2) -> Scheduler:
    """Threads A and B that write their letter after each of their points."""
    holder: list[Scheduler] = []

    def program(name: str) -> Callable[[], None]:
        def run() -> None:
            for number in range(points):
                holder[0].point(f"{number}")
                log.append(name)

        return run

    holder.append(Scheduler({name: program(name) for name in "AB"}))
    return holder[0]


def two_lockers(first: str, second: str) -> Scheduler:
    """A takes the locks named in `first` in that order, B those of `second`, with a point before each."""
    locks = {name: threading.Lock() for name in {*first, *second}}
    holder: list[Scheduler] = []

    def program(names: str) -> Callable[[], None]:
        def run() -> None:
            for name in names:
                holder[0].point(f"before {name}")
                locks[name].acquire()
            for name in names:
                locks[name].release()

        return run

    holder.append(Scheduler({"A": program(first), "B": program(second)}))
    return holder[0]


def test_race_scheduler_runs_threads_in_the_order_of_the_string() -> None:
    log: list[str] = []
    run = two_counters(log).run("ABBABA")
    assert "".join(log) == "BABA"
    assert run.schedule == "ABBABA"
    assert not run.errors


def test_race_scheduler_replays_a_run_from_its_schedule() -> None:
    first, again = two_lockers("xy", "yx").run("ABAB"), two_lockers("xy", "yx").run("ABAB")
    assert [step.thread for step in again.trace] == [step.thread for step in first.trace]
    assert two_lockers("xy", "yx").run(first.schedule).deadlocked == first.deadlocked


def test_race_scheduler_reports_a_thread_at_a_lock_as_blocked_and_goes_on() -> None:
    run = two_lockers("x", "x").run("ABAB")
    assert not run.deadlocked
    assert not run.errors
    assert not run.blocked  # A releases in the move in which it takes: no one waits
    held = two_lockers("xy", "x").run("ABAB")
    assert [step.thread for step in held.blocked] == ["B"]
    assert "in" not in held.errors
    assert not held.deadlocked


def test_race_scheduler_sees_a_deadlock() -> None:
    assert two_lockers("xy", "yx").run("AABBAB").deadlocked
    assert not two_lockers("xy", "xy").run("AABBAB").deadlocked


def test_race_exceptions_of_a_thread_are_a_result() -> None:
    def fail() -> None:
        raise ValueError("as planned")

    run = Scheduler({"A": fail, "B": lambda: None}).run("AB")
    assert run.errors == {"A": "ValueError: as planned"}


@pytest.mark.parametrize("points", [0, 1, 2, 3])
def test_race_enumeration_visits_each_schedule_once(points: int) -> None:
    runs: list[Run] = list(explore(lambda prefix: two_counters([], points).run(prefix)))
    assert len({run.schedule for run in runs}) == len(runs) == math.comb(2 * (points + 1), points + 1)


def test_race_unknown_sync_points_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trace\.nowhere"), hooked(lambda name: None, {"trace.nowhere"}):
        pass


def test_race_fork_returns_results_and_reports_failures() -> None:
    assert in_fork(lambda: 6 * 7) == 42
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_fork(lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        in_fork(lambda: threading.Event().wait(), limit_s=0.5)


def test_race_child_that_hangs_leaves_its_stacks() -> None:
    program = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); print('up', flush=True)\n"
    outcome = run_child(["-c", program + "def stuck_here(): time.sleep(600)\nstuck_here()"], limit_s=10.0)
    assert outcome.verdict == "hung"
    assert "stuck_here" in outcome.stacks


def test_race_child_that_crashes_is_told_from_one_that_fails() -> None:
    crash = run_child(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], limit_s=60.0)
    assert crash.verdict == "crashed"
    assert run_child(["-c", "raise SystemExit(3)"], limit_s=60.0).verdict == "broken"
    assert run_child(["-c", "print('fine')"], limit_s=60.0).line == "fine"


def test_race_unknown_strategy_ends_with_code_2_and_the_names() -> None:
    outcome = run_child(["-m", "repro.run", "config_ctx", "--strategy", "no-such"], limit_s=120.0)
    assert outcome.code == 2
    assert "no-such" in outcome.line


def test_race_interval_is_wilsons() -> None:
    assert Rate(0, 20).interval() == pytest.approx((0.0, 0.1611), abs=1e-3)  # published values
    assert Rate(5, 12).interval() == pytest.approx((0.1933, 0.6805), abs=1e-3)


def test_race_bodies_stay_under_60_lines() -> None:
    folder = Path(repro.bodies.__file__).parent
    long = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert {name: lines for name, lines in long.items() if lines >= 60} == {}
