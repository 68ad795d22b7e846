"""Isolated tracing alone, without the gate, in every order of two threads; and the same orders without it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from dflash.attention import STRATEGIES, isolated_tracing
from dflash.attention.base import Fn, Role
from dflash.attention.isolated import backward_ahead
from repro.exhaustive import count, subject
from repro.expected import expectation, fault, release


class WithoutTheGate:
    """What another project gets from the context managers: no steps, so no gate."""

    name = "isolation only"
    leaves_open = ""

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        raise NotImplementedError("the bodies compile for themselves")

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        with isolated_tracing(), backward_ahead():
            yield

    def step_scope(self, key: object) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.race
@pytest.mark.parametrize("name", ["FXFLAG", "FXSTUCK-A", "FXSTUCK-B", "PATCHREVERT"])
def test_no_order_of_two_threads_fails_under_isolation_and_some_do_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, WithoutTheGate.name, WithoutTheGate)
    isolated = count(subject(name), WithoutTheGate.name)
    assert isolated.problems == {}
    assert isolated.schedules > 1
    if expectation(fault(name), release()) == "shows":
        assert count(subject(name)).failing > 0
