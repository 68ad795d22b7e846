"""Options of the race suite: `--strategy NAME` puts a strategy in force in each child, `--record DIR` keeps results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.measure import Measurement


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("repro")
    group.addoption(
        "--strategy", default=None, help="strategy of dflash.attention that must turn each fault into a pass"
    )
    group.addoption("--record", default=None, metavar="DIR", help="write one JSON file a measurement, for repro.matrix")


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> str | None:
    """The strategy in force in the children, None without one."""
    name: str | None = request.config.getoption("--strategy")
    return name


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Measurement], None]:
    """Keeps a measurement in the directory of `--record`; does nothing without the option."""
    folder = request.config.getoption("--record")

    def write(measurement: Measurement) -> None:
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"{measurement.fault}-{measurement.torch}-{measurement.strategy}.json"
        (Path(folder) / name).write_text(json.dumps(measurement.as_json(), indent=1))

    return write
