"""Probes are tested as people use them: in a child process, on a program with the fault and on one without."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[2]
Child = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def child() -> Child:
    """Runs `python *words` from the repository's root: `child("-m", "probes.fx_state", "--json", "--", script)`."""

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)

    return run
