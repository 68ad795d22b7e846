"""The gate of locked-compile: exclusive against everything, shared beside shared."""

import threading

import pytest

from dflash.attention.locked import Gate

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


def test_asking_twice_in_one_thread_is_an_error_instead_of_a_hang_and_leaves_the_gate_usable() -> None:
    gate = Gate()
    with gate.shared():
        assert gate.held()
        with pytest.raises(AssertionError, match="already"), gate.exclusive():
            pass
        with pytest.raises(AssertionError, match="already"), gate.shared():
            pass
        assert gate.held()
    assert not gate.held()
    with gate.exclusive():
        assert gate.held()
