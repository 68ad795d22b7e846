"""A short natural stress of the safe strategies; `python -m tests.attention.stress` runs it as long as asked for."""

import pytest

from dflash.attention.select import STRATEGIES
from tests.attention.stress import run


@pytest.mark.race
@pytest.mark.parametrize(("strategy", "outside"), [("locked-compile", False), ("isolated", True)])
def test_threads_that_compile_fail_and_trace_at_once_get_right_results_and_leave_nothing(
    strategy: str, outside: bool
) -> None:
    stress, compiled, left = run(STRATEGIES[strategy](), seconds=1, threads=2, outside=outside)
    assert stress.failures == []
    assert left == []
    assert compiled >= 2 * stress.counts["step"]  # each step's forward and backward ran compiled
