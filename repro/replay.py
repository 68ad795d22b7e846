"""`python -m repro.replay FXFLAG AAAABBA [--strategy NAME]`: one schedule of two threads, move by move."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from repro.exhaustive import SUBJECTS, load, play, subject


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the trace and what was wrong; exit code 1 when something was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=[entry.name for entry in SUBJECTS])
    parser.add_argument("order", help="letters of the threads, e.g. AABAB; what is left runs in order of name")
    parser.add_argument("--strategy", default=None)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # forks need a process without a thread pool
    load(subject(chosen.subject))
    judged = play(subject(chosen.subject), chosen.order, chosen.strategy)
    for step in judged.run.trace:
        print(f"{step.thread} ran until {step.point}")
    if judged.run.skipped:
        print(f"could not move when asked: {', '.join(judged.run.skipped)}")
    print(f"schedule {judged.run.schedule}: {'; '.join(judged.problems) or 'nothing wrong'}")
    return int(bool(judged.problems))


if __name__ == "__main__":
    raise SystemExit(main())
