"""The index of the probes names every one that runs, with a line of what it is for."""

from pathlib import Path

import pytest

from probes import __main__ as program

FOLDER = Path(program.__file__).parent


def test_the_index_names_every_probe_that_runs_and_no_other_module(capsys: pytest.CaptureFixture[str]) -> None:
    program.main()
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    runs = {f.stem for f in FOLDER.glob("*.py") if "def main(argv" in f.read_text()}
    assert {words[0] for words in listed} == runs
    assert {"stacks", "fx_state"} <= runs
    assert "call_hooks" not in runs
    assert all(len(words) > 5 for words in listed)
