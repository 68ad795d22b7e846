"""`python -m repro.matrix` prints repro/matrix.json as REPORT.md's table; `merge DIR...` adds recorded runs to it."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from repro.expected import FAULTS
from repro.rates import Rate

MATRIX = Path(__file__).with_name("matrix.json")
Cell = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Merges, then prints; exit code 1 when a cell contradicts the expectation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("merge", nargs="?", choices=["merge"])
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, default=MATRIX, metavar="FILE")
    chosen = parser.parse_args(arguments)
    if chosen.merge:
        write(chosen.json, chosen.folders)
    matrix = json.loads(chosen.json.read_text())
    print(render(matrix))
    wrong = [cell for cell in matrix["cells"] if cell["wrong"]]
    for cell in wrong:
        print(f"\nwrong: {cell['fault']} on {cell['torch']}: {cell['wrong'].splitlines()[0]}")
    return int(bool(wrong))


def write(path: Path, folders: Iterable[Path]) -> None:
    """Replace the cells that the recorded runs have anew (same fault, torch, strategy) and keep the others."""
    old = json.loads(path.read_text())["cells"] if path.exists() else []
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = [
        {**json.loads(file.read_text()), "date": today} for folder in folders for file in sorted(folder.glob("*.json"))
    ]
    cells = {_key(cell): cell for cell in [*old, *new]}
    ordered = [cells[key] for key in sorted(cells, key=str)]
    path.write_text(json.dumps({"written": today, "cells": ordered}, indent=1) + "\n")


def render(matrix: dict[str, Any]) -> str:
    """Markdown: a row a fault and strategy, a column a torch version; k of n with the Wilson interval where n > 1."""
    cells = {_key(cell): cell for cell in matrix["cells"]}
    versions = sorted({cell["torch"] for cell in matrix["cells"]})
    rows = sorted({(cell["fault"], cell["strategy"]) for cell in matrix["cells"]}, key=_order)
    lines = [f"| fault | strategy | {' | '.join(versions)} |", "|---" * (len(versions) + 2) + "|"]
    for fault, strategy in rows:
        texts = [_text(cells.get((fault, version, strategy))) for version in versions]
        lines.append(f"| {fault} | {strategy or 'none'} | {' | '.join(texts)} |")
    dates = sorted({cell["date"] for cell in matrix["cells"]})
    return "\n".join([*lines, "", f"Run on {', '.join(dates)}; `nox -s matrix`."])


def _key(cell: Cell) -> tuple[str, str, str | None]:
    return cell["fault"], cell["torch"], cell["strategy"]


def _order(row: tuple[str, str | None]) -> tuple[int, str, str]:
    names = [entry.name for entry in FAULTS]
    fault, strategy = row
    return names.index(fault) if fault in names else len(names), fault, strategy or ""


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if cell["trials"] == 1:
        verdict = str(cell["verdicts"][0])
        text = {"clean": "no", "shown": "**yes**", "crashed": "**crash**", "hung": "**hang**"}.get(verdict, verdict)
    elif cell["fault"].startswith("SCHEDULES"):
        text = f"{cell['shown']} of {cell['trials']} schedules"  # all there are: no interval
    else:
        text = str(Rate(cell["shown"], cell["trials"]))
    return text + (" (unexpected)" if cell["wrong"] else "")


if __name__ == "__main__":
    raise SystemExit(main())
