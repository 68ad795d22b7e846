"""`nox -s matrix`: the race suite on each supported torch, in an environment of its own, into repro/matrix.json.

MATRIX_PYTHONS="2.11.0=/path/to/python 2.14.1=/path/to/python" uses interpreters that have that torch, the other
dependencies and pytest already, instead of installing; MATRIX_STRATEGY=NAME runs the suite under a strategy.
"""

from __future__ import annotations

import os
from pathlib import Path

import nox

TORCH_VERSIONS = ("2.11.0", "2.13.0", "2.14.1")
TEST_REQUIREMENTS = ("pytest>=8.4,<10", "pytest-xdist>=3.8,<4", "pytest-timeout>=2.4,<3")

nox.options.sessions = ["matrix"]


@nox.session
@nox.parametrize("version", TORCH_VERSIONS)
def matrix(session: nox.Session, version: str) -> None:
    """Arguments after `--` go to pytest, e.g. `nox -s matrix -- -k fx_flag`."""
    python = _given(version)
    if python is None:
        session.install(f"torch=={version}", "-e", ".", *TEST_REQUIREMENTS)
        python = str(Path(session.bin) / "python")
    record = Path(session.create_tmp()) / "record"
    command = [python, "-m", "pytest", "repro/", "-m", "race", "-n", "auto", "--record", str(record), *session.posargs]
    if strategy := os.environ.get("MATRIX_STRATEGY"):
        command += ["--strategy", strategy]
    # the result is recorded also when a cell contradicts the table: then the merge fails the session
    session.run(*command, external=True, success_codes=[0, 1], env={"OMP_NUM_THREADS": "1"})
    session.run(python, "-m", "repro.matrix", "merge", str(record), external=True)


def _given(version: str) -> str | None:
    """The interpreter that MATRIX_PYTHONS names for this version, if any."""
    pairs = (entry.partition("=") for entry in os.environ.get("MATRIX_PYTHONS", "").split())
    return {name: path for name, _, path in pairs}.get(version)
