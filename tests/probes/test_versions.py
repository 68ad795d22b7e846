"""versions finds out by experiment how far a write reaches, and says where that is not what was expected."""

import contextvars
import json
import threading

import pytest

from probes import torch_internals as ti
from probes.versions import EXPERIMENTS, Experiment, Reach, measure, reach_of

_shared = {"value": 0}
_context = contextvars.ContextVar("_context", default=0)
_thread = threading.local()


def _written(set_value):
    def write(visit):
        set_value(1)
        visit()
        set_value(0)

    return write


@pytest.mark.parametrize(
    ("write", "read", "reach"),
    [
        (_written(lambda v: _shared.update(value=v)), lambda: _shared["value"], Reach.PROCESS),
        (_written(_context.set), _context.get, Reach.CONTEXT),
        (_written(lambda v: setattr(_thread, "v", v)), lambda: getattr(_thread, "v", 0), Reach.THREAD),
        (_written(lambda v: None), lambda: 0, Reach.UNWRITTEN),
    ],
)
def test_the_experiment_tells_the_four_reaches_apart(write, read, reach):
    assert reach_of(Experiment("own state", write, read, lambda release: reach)) is reach


def test_a_reach_that_is_not_the_expected_one_is_a_surprise():
    write = _written(lambda v: _shared.update(value=v))
    wrong = Experiment("own state", write, lambda: _shared["value"], lambda release: Reach.THREAD)
    assert [state.name for state in measure([wrong]).surprises] == ["own state"]


def test_the_installed_torch_is_as_expected_and_quiet_afterwards(child):
    done = child("-m", "probes.versions", "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, report
    found = {state["name"]: state["found"] for state in report["states"]}
    assert len(found) == len(EXPERIMENTS)
    flag = Reach.PROCESS if ti.torch_release() <= (2, 13) else Reach.THREAD
    assert found["FX tracing flag, during a trace"] == flag.value


def test_an_experiment_that_fails_raises_instead_of_reporting():
    def broken(visit):
        raise KeyError("no such setting")

    with pytest.raises(KeyError):
        reach_of(Experiment("broken", broken, lambda: 0, lambda release: Reach.PROCESS))
