"""`dflash watch`: running, finished, torn and resumed runs; it ends when the run does and changes nothing."""

import io
import json
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from dflash.cli import main
from dflash.watch import Tail, WatchOptions, follow
from tests.report.made_runs import finish, make_run, step_record
from tests.training import unchanged


def test_one_look_at_an_interrupted_run_shows_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with unchanged(tmp_path):
        assert main(["watch", str(run), "--once"]) == 0
    out = capsys.readouterr().out
    assert "step 60/400  loss" in out
    assert "held-out tau 2.000" in out
    assert "finished" not in out


def test_watching_a_finished_run_ends_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    finish(run)
    assert main(["watch", str(run)]) == 0
    assert f"finished: dflash report {run}" in capsys.readouterr().out


def test_the_end_of_an_earlier_run_is_not_taken_for_this_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    finish(run)
    os.utime(run / "evaluation.json", (1, 1))
    assert main(["watch", str(run), "--once"]) == 0
    assert "finished" not in capsys.readouterr().out


def test_steps_that_come_while_watching_are_shown_until_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, evaluations=())
    console = Console(file=io.StringIO(), width=120)
    watching = threading.Thread(target=follow, args=(WatchOptions(run, interval_s=0.01), console))
    watching.start()
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(step_record(2)) + "\n")
    finish(run)
    watching.join(30)
    assert not watching.is_alive()
    assert isinstance(console.file, io.StringIO)
    assert "step 2/400" in console.file.getvalue()


def test_a_terminal_shows_one_picture_and_says_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    finish(run)
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    assert follow(WatchOptions(run, interval_s=0.01), console) == 0
    assert isinstance(console.file, io.StringIO)
    assert "finished" in console.file.getvalue()


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.records()) == []
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert [r["step"] for r in tail.records()] == [1]
    with path.open("a") as stream:
        stream.write('ep", "step": 2}\n')
    assert [r["step"] for r in tail.records()] == [2]
    assert list(tail.records()) == []


def test_a_file_cut_by_a_resumed_run_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines))
    tail = Tail(path)
    assert len(list(tail.records())) == 3
    shorter = tmp_path / "new"
    shorter.write_text("".join(lines[:2]))
    os.replace(shorter, path)
    assert [r["step"] for r in tail.records()] == [1, 2]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["nowhere"], "nowhere: expected a run's directory, got no such directory"),
        (["."], "no config.json of a run"),
        ([".", "--interval-s", "0"], "--interval-s: expected seconds above 0"),
    ],
)
def test_what_is_no_run_is_one_line(
    words: list[str], fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    err = capsys.readouterr().err
    assert fragment in err
    assert err.count("\n") == 1
