"""`python -m repro.counts [SUBJECT ...] [--strategy NAME] [--json FILE]`: how many schedules of two threads fail."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from repro.exhaustive import SUBJECTS, count, subject


def main() -> int:
    """Prints one line a subject as soon as it is counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", default=[entry.name for entry in SUBJECTS], metavar="SUBJECT")
    parser.add_argument("--strategy", default=None)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # forks need a process without a thread pool
    results = []
    for name in chosen.subjects:
        started = time.monotonic()
        result = count(subject(name), chosen.strategy)
        print(f"torch {torch.__version__} {result} [{time.monotonic() - started:.0f} s]", flush=True)
        results.append({"torch": torch.__version__, **result.as_json()})
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
