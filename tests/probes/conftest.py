"""Probes are tested as people use them: in a child process, on a program with the fault and on one without."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from children import HERE, run_child, watched_cache_program

Child = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def child() -> Child:
    """Runs `python *words` from the repository's root: `child("-m", "probes.fx_state", "--json", "--", script)`."""
    return run_child


@pytest.fixture(scope="session")
def call_runs() -> Callable[[str, str], dict[str, dict[str, Any]]]:
    """`call_runs("faulty" | "clean", "alone" | "calls" | "trace")`: every program of call_programs, each made once."""
    made: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}

    def runs(mode: str, watched: str) -> dict[str, dict[str, Any]]:
        if (mode, watched) not in made:
            done = run_child(HERE / "call_programs.py", "all", mode, watched)
            assert done.returncode == 0, done.stderr
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            made[mode, watched] = {line["name"]: line for line in lines}
        return made[mode, watched]

    return runs


@pytest.fixture(scope="session")
def poisoning(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A cache poisoned while compiled_calls watched, and the same graph served from it: `cache`, `first`, `served`."""
    cache = tmp_path_factory.mktemp("cache")
    story: dict[str, Any] = {"cache": cache}
    for name, mode in (("first", "poison"), ("served", "clean")):
        story[name] = watched_cache_program(cache, mode)
    return story
