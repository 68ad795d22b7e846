"""The report: any run, also a broken or a running one; names escaped; what a browser makes of the page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash.cli import main
from dflash.config import PRESETS, OptimOptions
from dflash.report.page import page
from dflash.report.run_data import read_run
from tests.report.browser import measured, opened
from tests.report.made_runs import add_trace, finish, make_run, step_record

PICTURES = {
    "Acceptance length on held-out prompts", "Acceptance by slot", "Acceptance length in training", "Loss",
    "Accuracy over all slots", "Throughput", "Time of a step", "Gradient norm before clipping", "Learning rate",
}  # fmt: skip


class Balanced(HTMLParser):
    """Collects elements; fails when one is closed that was not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> list[str]:
    """The names of all elements of a page whose elements are properly nested."""
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


def test_an_interrupted_run_with_a_torn_last_line_has_every_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "step": 61, "lo')
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    seen = checked(text)
    assert seen.count("svg") == len(PICTURES)
    assert "60 of 400" in text
    assert "not finished" in text


def test_a_finished_run_shows_its_closing_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    finish(run)
    text = page([read_run(run)])
    assert all(words in text for words in ("finished", "2.500 (step 40)", "1.40x", "48 of 48"))
    assert "not finished" not in text


def test_a_run_without_evaluation_and_one_without_a_step_say_so_in_place_of_pictures(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path / "a", evaluations=()))])
    assert text.count("nothing logged yet") == 2  # held-out tau and acceptance by slot
    assert checked(text).count("svg") == len(PICTURES) - 2
    empty = make_run(tmp_path / "b", steps=0, evaluations=())
    (empty / "metrics.jsonl").unlink()
    text = page([read_run(empty)])
    assert "nothing logged yet" in text
    assert checked(text).count("svg") == 0


def test_values_that_are_not_finite_leave_a_gap_and_no_broken_coordinate(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({**step_record(6), "grad_norm": float("inf"), "loss": float("nan")}) + "\n")
        stream.write(json.dumps({"kind": "skip", "step": 7, "reason": "not finite", "loss": "nan"}) + "\n")
    text = page([read_run(run)])
    coordinates = re.findall(r' (?:points|x|y|x1|y1|cx|cy|width|height)="([^"]*)"', text)
    assert coordinates
    assert not [c for c in coordinates if "nan" in c or "inf" in c]
    assert "Skipped steps (1)" in text


def test_names_from_a_run_are_text_and_never_elements(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    config = replace(PRESETS["tiny"], data=replace(PRESETS["tiny"].data, train=evil))
    run = make_run(tmp_path / "a <b>", config=config)
    add_trace(run, "trace <i>.json")
    text = page([read_run(run)])
    seen = checked(text)
    assert "script" not in seen
    assert "b" not in seen
    assert evil not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in text


def test_two_runs_show_what_differs_and_only_that(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", config=replace(tiny, optim=OptimOptions(lr=0.125)))
    text = page([read_run(first), read_run(second)])
    differs = text[text.index("<th scope=\"col\">differs") : text.index("<details>")]
    assert re.findall(r'<th scope="row">([^<]*)', differs) == ["output", "optim.lr"]
    assert "0.125" in differs


def test_a_compile_trace_becomes_a_time_line_with_a_lane_a_thread(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "time line" not in page([read_run(run)])
    add_trace(run)
    (run / "other-trace.json").write_text('{"not": "a trace"')
    text = page([read_run(run)])
    assert "Compile time line by thread" in text
    assert text.count('class="stage ') == 6
    assert {"drafter-7 (7)", "drafter-8 (8)"} <= set(re.findall(r"<title>(drafter[^<]*)</title>", text))


def test_the_queue_and_late_compiles_are_shown_when_they_are_logged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    text = page([read_run(run)])
    assert "Queue" not in text
    assert "Compiles during the run" not in text
    with (run / "metrics.jsonl").open("a") as stream:
        for step in (1, 2, 3):
            flow = {"kind": "flow", "step": step, "put_wait_ms": 3.0 * step, "take_wait_ms": 9.5, "queued": 2}
            stream.write(json.dumps(flow) + "\n")
        stream.write('{"kind": "late_compile", "step": 3, "thread": "drafter-1", "reason": "size <mismatch>"}\n')
    text = page([read_run(run)])
    assert "Queue waits" in text
    assert "</i> drafters wait for features</span>" in text
    assert "Compiles during the run (1)" in text
    assert "size &lt;mismatch&gt;" in text


def test_the_page_reaches_for_nothing_outside_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_trace(run)
    text = page([read_run(run)])
    assert re.findall(r'(?:src|href|srcset)="(?!data:)[^"]*"|url\(|@import|https?://', text) == []
    assert "<script" not in text


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20_000)
    assert len(page([read_run(run)])) < 300_000


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ([], ["at least one run's directory"]),
        (["nowhere"], ["nowhere: expected a run's directory, got no such directory"]),
        (["."], ["no config.json of a run"]),
    ],
)
def test_a_directory_that_is_no_run_is_one_line_and_writes_nothing(
    words: list[str], fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run), "-o", str(tmp_path / "none" / "page.html")]) == 2
    assert "page.html: expected a place for the page" in capsys.readouterr().err


def test_a_browser_has_nothing_to_complain_of_and_shows_every_picture_on_a_phone(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    add_trace(runs[0])
    output = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "-o", str(output)]) == 0
    found = measured(output, tmp_path / "profile", width=360)
    assert {picture["title"] for picture in found["drawn"]} == PICTURES | {f"{runs[0]}: trace.json"}
    assert all(picture["marks"] >= 2 and picture["width"] > 250 for picture in found["drawn"])
    assert found["overflow"] == 0


def test_the_browser_check_sees_a_complaint_an_empty_picture_and_an_overflow(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<!doctype html><link rel="icon" href="data:,"><body><script>undefinedName()</script>')
    assert any("undefinedName" in line for line in opened(bad, tmp_path / "profile")[1])
    bad.write_text('<!doctype html><body><svg aria-label="x" width="2000"><polyline points="" fill="none"/></svg>')
    found = measured(bad, tmp_path / "profile", width=360)
    assert found["drawn"] == [{"title": "x", "width": 2000, "marks": 0}]
    assert found["overflow"] > 0
