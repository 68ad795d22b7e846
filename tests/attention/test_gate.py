"""The gate of locked-compile: exclusive against everything, shared beside shared."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.attention.gate import Gate, GateTimeout

WAIT_S = 10
BRIEF_S = 0.05


class Holder(threading.Thread):
    """Holds the gate in one way until told to leave; errors of the thread are kept."""

    def __init__(self, gate: Gate, way: str) -> None:
        super().__init__(daemon=True)
        self.scope = getattr(gate, way)
        self.inside, self.leave = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.scope():
            self.inside.set()
            assert self.leave.wait(WAIT_S)

    def finish(self) -> None:
        self.leave.set()
        self.join(WAIT_S)
        assert not self.is_alive()


def test_shared_holders_are_inside_together() -> None:
    gate = Gate()
    holders = [Holder(gate, "shared"), Holder(gate, "shared")]
    assert all(h.inside.wait(WAIT_S) for h in holders)
    for holder in holders:
        holder.finish()


@pytest.mark.parametrize(("first", "second"), [("exclusive", "shared"), ("shared", "exclusive"), ("exclusive",) * 2])
def test_an_exclusive_holder_is_alone(first: str, second: str) -> None:
    gate = Gate()
    one = Holder(gate, first)
    assert one.inside.wait(WAIT_S)
    two = Holder(gate, second)
    assert not two.inside.wait(BRIEF_S)
    one.finish()
    assert two.inside.wait(WAIT_S)
    two.finish()


def test_a_waiting_exclusive_holder_goes_before_new_shared_ones_so_it_is_never_starved() -> None:
    gate = Gate()
    reader = Holder(gate, "shared")
    assert reader.inside.wait(WAIT_S)
    writer = Holder(gate, "exclusive")
    assert not writer.inside.wait(BRIEF_S)
    late = Holder(gate, "shared")
    assert not late.inside.wait(BRIEF_S)
    reader.finish()
    assert writer.inside.wait(WAIT_S)
    assert not late.inside.is_set()
    writer.finish()
    assert late.inside.wait(WAIT_S)
    late.finish()


@pytest.mark.parametrize("outer", ["shared", "exclusive"])
@pytest.mark.parametrize("inner", ["shared", "exclusive"])
def test_a_thread_may_ask_again_and_holds_what_it_had_when_the_inner_scope_ends(outer: str, inner: str) -> None:
    gate = Gate(timeout_s=WAIT_S)
    with getattr(gate, outer)(), getattr(gate, inner)():
        other = Holder(gate, "shared")
        assert other.inside.wait(BRIEF_S) is (outer == inner == "shared")
        if outer == inner == "shared":
            other.finish()
    assert not gate.held()
    if (outer, inner) != ("shared", "shared"):
        assert other.inside.wait(WAIT_S)
        other.finish()
    with getattr(gate, outer)():
        with getattr(gate, inner)():
            pass
        beside = Holder(gate, "shared")
        assert beside.inside.wait(BRIEF_S) is (outer == "shared")
    beside.finish()


def test_a_shared_holder_may_ask_again_while_an_exclusive_one_waits_for_it() -> None:
    gate = Gate(timeout_s=WAIT_S)
    with gate.shared():
        writer = Holder(gate, "exclusive")
        assert not writer.inside.wait(BRIEF_S)
        with gate.shared():
            assert not writer.inside.is_set()
    writer.finish()


def test_two_shared_holders_that_both_become_exclusive_take_turns_instead_of_waiting_for_each_other() -> None:
    gate, both, inside, most = Gate(timeout_s=WAIT_S), threading.Barrier(2), [], []

    def upgrade() -> None:
        with gate.shared():
            both.wait(WAIT_S)
            with gate.exclusive():
                inside.append(1)
                most.append(len(inside))
                time.sleep(BRIEF_S)
                inside.pop()

    threads = [threading.Thread(target=upgrade, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == [1, 1]


def test_a_wait_that_takes_too_long_names_the_holder_and_leaves_the_gate_usable() -> None:
    gate = Gate(timeout_s=BRIEF_S)
    holder = Holder(gate, "exclusive")
    holder.name = "drafter-7"
    assert holder.inside.wait(WAIT_S)
    for way in (gate.shared, gate.exclusive):
        with pytest.raises(GateTimeout, match=r"held by \S+ \(exclusive, for 0\.\d s\)"), way("my step"):
            pass
    assert not gate.held()
    holder.finish()
    with gate.shared(), gate.exclusive():
        pass


@pytest.mark.parametrize("way", ["shared", "exclusive"])
def test_an_exception_inside_releases_the_gate(way: str) -> None:
    gate = Gate(timeout_s=WAIT_S)
    with pytest.raises(ZeroDivisionError), getattr(gate, way)():
        raise ZeroDivisionError
    assert not gate.held()
    other = Holder(gate, "exclusive")
    assert other.inside.wait(WAIT_S)
    other.finish()


def test_two_gates_do_not_know_each_other_and_nest_in_any_order() -> None:
    one, two = Gate(timeout_s=WAIT_S), Gate(timeout_s=WAIT_S)
    with one.exclusive(), two.exclusive(), one.exclusive(), two.shared():
        assert one.held()
        assert two.held()
    assert not one.held()
    assert not two.held()


def in_autograds_own_thread(work: Callable[[], object]) -> tuple[bool, object]:
    """Runs `work` in a backward nested deeper than the engine allows in one thread; whether it was another thread."""
    found: list[tuple[int, object]] = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            if ctx.depth == 0:
                found.append((threading.get_ident(), work()))
            else:
                nested(ctx.depth - 1)
            return gradient, None

    def nested(depth: int) -> None:
        with torch.enable_grad():
            Deep.apply(torch.ones(1, requires_grad=True), depth).sum().backward()

    nested(70)
    return found[0][0] != threading.get_ident(), found[0][1]


@pytest.mark.parametrize("way", ["shared", "exclusive"])
def test_autograds_thread_that_runs_a_holders_backward_holds_the_gate_too(way: str) -> None:
    """Checkpointed layers call compiled code there; waiting for the gate would wait for the step that waits for it."""
    gate = Gate(timeout_s=WAIT_S)

    def ask() -> bool:
        with gate.exclusive() if way == "exclusive" else gate.shared():
            return gate.held()

    with getattr(gate, way)():
        assert in_autograds_own_thread(ask) == (True, True)
    assert in_autograds_own_thread(gate.held) == (True, False)
