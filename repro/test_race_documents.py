"""The table, the matrix and the reports agree with each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from repro.expected import FAULTS, RELEASES, expectation
from repro.matrix import render, write

pytestmark = pytest.mark.race
UPSTREAM = Path(__file__).with_name("upstream")
BODIES = Path(__file__).with_name("bodies")


def reported() -> set[str]:
    lines = [re.search(r"^Faults: (.*)$", path.read_text(), re.M) for path in UPSTREAM.glob("*.md")]
    return {name for line in lines if line is not None for name in line[1].split(", ")}


def test_race_every_fault_open_on_the_newest_torch_has_a_report() -> None:
    still_open = {entry.name for entry in FAULTS if expectation(entry, RELEASES[-1]) == "shows"}
    assert still_open - reported() == set()


def test_race_reports_name_scripts_that_exist() -> None:
    named = {name for path in UPSTREAM.glob("*.md") for name in re.findall(r"(\w+\.py)`", path.read_text())}
    own = {name for name in named if not (BODIES / name).exists()}
    torch_files = {
        "flex_attention.py",
        "graph.py",
        "proxy.py",
        "_symbolic_trace.py",
        "convert_frame.py",
        "eval_frame.py",
    }
    torch_files |= {"aot_autograd.py", "compile_fx.py", "_config_module.py", "__init__.py", "_ops.py"}
    assert own - torch_files == set()


def test_race_every_body_has_a_row_in_the_table() -> None:
    bodies = {path.stem for path in BODIES.glob("*.py")} - {"__init__"}
    assert bodies == {entry.body for entry in FAULTS}


def cell(fault: str, verdicts: list[str], wrong: str | None = None) -> dict[str, object]:
    shown = sum(verdict != "clean" for verdict in verdicts)
    facts = {"fault": fault, "torch": "2.13.0", "strategy": None, "verdicts": verdicts, "wrong": wrong}
    return {**facts, "shown": shown, "trials": len(verdicts)}


def test_race_matrix_keeps_old_cells_replaces_rerun_ones_and_marks_unexpected(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, cells in (
        (first, [cell("FXFLAG", ["clean"], "expected shows"), cell("CASE", ["shown", "clean"])]),
        (second, [cell("FXFLAG", ["shown"])]),
    ):
        folder.mkdir()
        for number, entry in enumerate(cells):
            (folder / f"{number}.json").write_text(json.dumps(entry))
    path = tmp_path / "matrix.json"
    write(path, [first])
    assert "| FXFLAG | none | no (unexpected) |" in render(json.loads(path.read_text()))
    write(path, [second])
    table = render(json.loads(path.read_text()))
    assert "| FXFLAG | none | **yes** |" in table
    assert "| CASE | none | 1 of 2 (9% to 91%) |" in table
