"""Runs one program in a child process with a time limit: a crash, a hang or leaked state stays in the child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["shown", "clean", "skipped", "crashed", "hung", "broken"]

CLEAN, SHOWN, SKIPPED = 0, 1, 77
ROOT = Path(__file__).resolve().parent.parent
_STACKS_S = 3.0


@dataclass(frozen=True)
class Outcome:
    """How a child ended; `stacks` are all its Python stacks when it hung or crashed, `line` its verdict line."""

    verdict: Verdict
    code: int | None
    line: str
    output: str
    stacks: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def run_child(
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Outcome:
    """Run `python arguments` from the repository's root with an empty inductor cache of its own (kept if given)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="repro-", ignore_cleanup_errors=True) as scratch:
        out_path = Path(scratch) / "output"
        with out_path.open("wb") as out:
            child = subprocess.Popen(
                [python, "-X", "faulthandler", *arguments],
                cwd=ROOT,
                env=_environment(scratch, environment or {}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stacks = _wait(child, limit_s, out_path)
        output = out_path.read_text(errors="replace")
    hung = bool(stacks)
    if not hung:
        stacks = output if _crashed(child.returncode) else ""
    verdict = "hung" if hung else _verdict(child.returncode)
    return Outcome(verdict, child.returncode, _last_line(output), output, stacks, time.monotonic() - started)


def run_body(
    body: str,
    limit_s: float,
    strategy: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run `repro.bodies.<body>` in a child, with a strategy of dflash.attention in force there if one is named."""
    chosen = ["--strategy", strategy] if strategy is not None else []
    return run_child(["-m", "repro.run", body, *chosen, *arguments], limit_s, environment)


def _environment(scratch: str, extra: Mapping[str, str]) -> dict[str, str]:
    fresh = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(scratch) / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of helper processes: quicker to start, nothing to leave behind
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # pays only from the second C++ kernel on
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # saves a trial compile and two more imports of torch for each empty cache
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **fresh, **extra}


def _wait(child: subprocess.Popen[bytes], limit_s: float, output: Path) -> str:
    """Wait for the child; past the limit, have it print its stacks (repro.run registers SIGUSR1), then kill it."""
    try:
        child.wait(limit_s)
        return ""
    except subprocess.TimeoutExpired:
        before = output.stat().st_size
        os.kill(child.pid, signal.SIGUSR1)
        try:
            child.wait(_STACKS_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return output.read_bytes()[before:].decode(errors="replace") or "no stacks: the child did not answer SIGUSR1"


def _crashed(code: int) -> bool:
    return code < 0


def _verdict(code: int) -> Verdict:
    if _crashed(code):
        return "crashed"
    known: dict[int, Verdict] = {CLEAN: "clean", SHOWN: "shown", SKIPPED: "skipped"}
    return known.get(code, "broken")


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else ""
