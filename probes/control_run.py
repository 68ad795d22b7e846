"""Does a probe change what it measures? The same program in two child processes, bare and watched, compared."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from probes.run_target import Target


@dataclass(frozen=True)
class ControlRun:
    """Exit codes, equality of everything the program printed, and wall times in seconds of the two runs."""

    bare_exit: int
    watched_exit: int
    same_output: bool
    bare_s: float
    watched_s: float

    @property
    def same(self) -> bool:
        """The program printed the same; and a program that failed did so in both runs."""
        return self.same_output and (self.bare_exit == 0 or self.watched_exit != 0)

    def __str__(self) -> str:
        verdict = "the same output" if self.same_output else "DIFFERENT output"
        return (
            f"with and without the probe: {verdict}, exit {self.watched_exit} and {self.bare_exit}, "
            f"{self.watched_s:.1f} s and {self.bare_s:.1f} s"
        )


def compare_with_bare_run(target: Target, probe: str, watch: Sequence[str] = ()) -> ControlRun:
    """Run `target` bare and under `python -m probes.<probe>`; compares stdout, of which the report is the last line."""
    words = [*(["-m"] if target.is_module else []), target.name, *target.args]
    watching = [word for spec in watch for word in ("--watch", spec)]
    bare, bare_s = _timed([sys.executable, *words])
    watched, watched_s = _timed([sys.executable, "-m", f"probes.{probe}", "--json", *watching, "--", *words])
    return ControlRun(
        bare_exit=bare.returncode,
        watched_exit=watched.returncode,
        same_output=bare.stdout == _before_report(watched.stdout),
        bare_s=bare_s,
        watched_s=watched_s,
    )


def _before_report(stdout: str) -> str:
    """What the program itself printed: all before the line break that the probe put before its last line."""
    return stdout.rstrip("\n").rpartition("\n")[0]


def _timed(command: Sequence[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, time.perf_counter() - began
