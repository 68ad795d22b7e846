"""probes.overhead: what is measured and what decides. Times themselves are the machine's; none is asserted."""

from __future__ import annotations

import pytest

from probes.overhead import OverheadResult, ProbeCost, measure


def cost(installed_us: float, hooks_left: int = 0) -> OverheadResult:
    return OverheadResult((ProbeCost("p", 1000.0, installed_us, 0.0, hooks_left),), 0)


@pytest.mark.parametrize(("installed_us", "finding"), [(0.0, False), (49.0, False), (50.0, True)])
def test_five_percent_of_the_call_is_the_limit(installed_us: float, finding: bool) -> None:
    assert cost(installed_us).finding is finding


def test_a_hook_left_behind_is_a_finding() -> None:
    assert cost(0.0, hooks_left=1).finding


def test_no_probe_leaves_a_hook_and_none_is_there_before() -> None:
    result = measure(pairs=3)
    assert [c.probe for c in result.probes] == ["compiled_calls", "compile_trace"]
    assert result.hooks_when_not_installed == 0
    assert [c.hooks_left for c in result.probes] == [0, 0]
    assert all(c.call_us > 0 for c in result.probes)
