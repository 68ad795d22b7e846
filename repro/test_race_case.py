"""The case that the project grew out of, for its rate: three threads first-compiling drafter attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repro.expected import fault
from repro.measure import Measurement, measure

pytestmark = [pytest.mark.race, pytest.mark.timeout(600)]


def test_race_case(strategy: str | None, record: Callable[[Measurement], None]) -> None:
    """On torch 2.11 steps may raise (FXFLAG inside AOTAutograd's trace); from 2.13 that window is masked."""
    measurement = measure(fault("CASE"), strategy)
    record(measurement)
    print(f"CASE: {measurement.rate}; {measurement.lines}")
    assert measurement.wrong is None, measurement.wrong
