"""One test a fault: it shows where it must, and only there; under `--strategy` it must not show at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from repro.expected import FAULTS, Fault, missing
from repro.measure import Measurement, measure

pytestmark = [pytest.mark.race, pytest.mark.timeout(600)]


@pytest.mark.parametrize("entry", [entry for entry in FAULTS if entry.name != "CASE"], ids=lambda entry: entry.body)
def test_race_fault_shows_exactly_where_the_table_says(
    entry: Fault, strategy: str | None, record: Callable[[Measurement], None]
) -> None:
    if reason := missing(entry):
        pytest.skip(reason)
    measurement = measure(entry, strategy)
    record(measurement)
    print(f"{entry.name}: {measurement.rate}; {measurement.lines[-1]}")
    assert measurement.wrong is None, measurement.wrong
