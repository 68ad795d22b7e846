"""Cold steps alone, warm steps together, and a compile that no key foretold: seen, counted, explained, cold again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from dflash.attention.cold_steps import ColdSteps
from dflash.attention.compile_watch import watched_compiles
from dflash.attention.gate import Gate
from dflash.attention.locked import LockedCompile
from probes.torch_internals import compile_lock, resolve

WAIT_S = 20.0
BRIEF_S = 0.05


def compiled() -> Callable[[Tensor], Tensor]:
    """A function of its own, so that no other test has compiled it."""
    torch.compiler.reset()
    return torch.compile(lambda x: x * 3, backend="eager", dynamic=False)


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, name="other", daemon=True)
    thread.start()
    yield thread
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_compile_in_a_warm_step_is_counted_with_torchs_reason_and_makes_the_key_cold_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, function = ColdSteps(Gate()), compiled()
    with watched_compiles():
        for size in (2, 2, 5, 5, 5):
            with steps.step("a key that leaves out the size"):
                function(torch.ones(size))
    assert steps.cold == 2  # the first step, and the one after the surprise
    assert [(late.thread, late.key) for late in steps.late] == [("MainThread", "a key that leaves out the size")]
    assert "expected 2, actual 5" in steps.late[0].reason
    assert "expected 2, actual 5" in caplog.text


def test_steps_with_keys_of_their_own_never_compile_late() -> None:
    steps, function = ColdSteps(Gate()), compiled()
    with watched_compiles():
        for size in (2, 2, 5, 5, 2):
            with steps.step(size):
                function(torch.ones(size))
    assert (steps.cold, steps.late) == (2, [])


def test_a_late_compile_is_blamed_on_its_own_thread_and_key_though_others_are_in_warm_steps() -> None:
    steps, function = ColdSteps(Gate()), compiled()
    for key in ("mine", "theirs"):
        with steps.step(key):
            function(torch.ones(2))
    inside, leave = threading.Event(), threading.Event()

    def innocent() -> None:
        with steps.step("theirs"):
            inside.set()
            leave.wait(WAIT_S)

    with watched_compiles(), in_thread(innocent):
        assert inside.wait(WAIT_S)
        with steps.step("mine"):
            function(torch.ones(7))
        leave.set()
    assert [(late.thread, late.key) for late in steps.late] == [("MainThread", "mine")]


def test_a_step_that_compiles_late_and_fails_is_still_counted() -> None:
    steps, function = ColdSteps(Gate()), compiled()
    with steps.step("k"):
        function(torch.ones(2))

    def compile_and_fail(x: Tensor) -> None:
        function(x)
        raise ZeroDivisionError

    with watched_compiles(), pytest.raises(ZeroDivisionError), steps.step("k"):
        compile_and_fail(torch.ones(3))
    assert len(steps.late) == 1


def test_warm_steps_of_one_key_are_inside_at_the_same_time_and_a_cold_one_is_not() -> None:
    steps = ColdSteps(Gate(timeout_s=WAIT_S))
    with steps.step("k"):
        pass
    together = threading.Barrier(2)

    def warm() -> None:
        with steps.step("k"):
            together.wait(WAIT_S)

    with in_thread(warm), steps.step("k"):
        together.wait(WAIT_S)
    entered = threading.Event()

    def cold() -> None:
        with steps.step("another"):
            entered.set()

    with in_thread(cold):
        with steps.step("k"):
            pass
        assert entered.wait(WAIT_S)
    with steps.step("k"), in_thread(lambda: None):
        pass


def test_a_cold_step_waits_for_warm_ones() -> None:
    steps, entered = ColdSteps(Gate(timeout_s=WAIT_S)), threading.Event()
    with steps.step("k"):
        pass

    def cold() -> None:
        with steps.step("another"):
            entered.set()

    with steps.step("k"):
        thread = threading.Thread(target=cold, daemon=True)
        thread.start()
        assert not entered.wait(BRIEF_S)
    assert entered.wait(WAIT_S)
    thread.join(WAIT_S)


def test_the_watch_is_taken_off_with_the_last_scope() -> None:
    before = resolve("dynamo.compile_frame")
    with watched_compiles():
        with watched_compiles():
            watched = resolve("dynamo.compile_frame")
        assert resolve("dynamo.compile_frame") is watched
    assert watched is not before
    assert resolve("dynamo.compile_frame") is before


def test_a_thread_that_holds_compile_lock_calls_through_instead_of_waiting_for_a_step_that_waits_for_the_lock() -> None:
    gate = Gate(timeout_s=1.0)
    call = LockedCompile(gate)._behind_gate(lambda x: x + 1, lambda x: x)
    inside, leave = threading.Event(), threading.Event()

    def step() -> None:
        with gate.exclusive():
            inside.set()
            leave.wait(WAIT_S)

    with in_thread(step):
        assert inside.wait(WAIT_S)
        with compile_lock():
            assert call(1) == 2
        leave.set()
