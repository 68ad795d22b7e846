"""Child processes of the tests of the probes, and how their output is read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


def split_report(stdout: str) -> tuple[str, Any]:
    """What a watched program printed, exactly, and the report that `--json` put on the last line."""
    printed, _, report = stdout.rstrip("\n").rpartition("\n")
    return printed, json.loads(report)


def run_child(*words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """`python *words` in the repository's root, which its scripts can import from; `settings`: environment."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | settings
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=250)


def watched_cache_program(cache: Path, mode: str) -> tuple[int, str, Any]:
    """Exit code, last printed line and report of compiled_calls on one of cache_programs with this cache."""
    words = ("--json", "--", HERE / "cache_programs.py", mode)
    done = run_child("-m", "probes.compiled_calls", *words, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.stdout, done.stderr
    printed, report = split_report(done.stdout)
    return done.returncode, printed.splitlines()[-1], report
