"""What a run shows and what it writes to metrics.jsonl."""

import errno
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dflash import metrics_file
from dflash.errors import OutputError
from dflash.live_view import throughput
from dflash.log import PlainErrors, RunLog, StepLine, duration
from dflash.metrics_file import MetricsFile


def line(step: int, loss: float = 2.5) -> StepLine:
    return StepLine(step, 0, loss, 0.25, 1.75, 1e-3, 0.5, 16, 500, 100.0, 5000.0)


def log(*, terminal: bool, interval_s: float = 0.0) -> tuple[RunLog, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, legacy_windows=False)
    return RunLog(console, plain_interval_s=interval_s), file


def test_without_a_terminal_steps_are_plain_lines() -> None:
    shown, file = log(terminal=False)
    with shown.live(10, 0):
        shown.step(line(1))
        shown.step(line(2, loss=2.25))
    lines = file.getvalue().splitlines()
    assert lines[0] == "step 1/10  loss 2.500  acc 0.250  tau 1.75  lr 1.00e-03  5.00 ktok/s  eta 0:01"
    assert lines[1].startswith("step 2/10  loss 2.250")
    assert "\x1b" not in file.getvalue()


def test_plain_lines_come_now_and_then_but_the_first_and_the_last_always() -> None:
    shown, file = log(terminal=False, interval_s=1e6)
    with shown.live(10, 0):
        for step in range(1, 11):
            shown.step(line(step))
    assert [text.split()[1] for text in file.getvalue().splitlines()] == ["1/10", "10/10"]


def test_on_a_terminal_one_bar_shows_stage_loss_and_speed_and_is_taken_away_cleanly() -> None:
    shown, file = log(terminal=True)
    with shown.live(10, 0):
        shown.step(line(4))
        shown.part("evaluate", 2, 5)
    text = file.getvalue()
    for part in ("4/10", "loss 2.500", "tau 1.75", "ktok/s", "eta", "evaluate 2/5"):
        assert part in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and is back


@pytest.mark.parametrize(("tok_s", "text"), [(999.0, "999 tok/s"), (1000.0, "1.00 ktok/s"), (12.4, "12 tok/s")])
def test_small_speeds_are_not_printed_in_thousands(tok_s: float, text: str) -> None:
    assert throughput(tok_s) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3661, "1:01:01")])
def test_durations_read_as_clocks(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_records_after_the_checkpoint_and_a_torn_line_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(1, 5):
            metrics.write("step", step, {"loss": step / 3})
        metrics.write("eval", 4, {"tau": 2.0})
        metrics.sync()
    with path.open("a") as stream:
        stream.write('{"kind": "step", "step": 5, "lo')
    metrics_file.cut_after(path, 3)
    assert [record["step"] for record in metrics_file.read(path)] == [1, 2, 3]
    assert metrics_file.read(path, "step")[2]["loss"] == 1.0
    assert path.read_text().endswith("\n")
    metrics_file.cut_after(tmp_path / "absent.jsonl", 3)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_record_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("step", 1, {"loss": 0.1 + 0.2})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"kind": "step", "step": 1, "loss": 0.1 + 0.2}


def test_a_full_disk_is_one_error() -> None:
    with pytest.raises(OutputError, match="expected room for metrics, got No space left"), MetricsFile(
        Path("/dev/full")
    ) as metrics:
        metrics.write("step", 1, {})


class Gone(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_reader_that_goes_away_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(PlainErrors(file=Gone(), width=80))
    log.line("one")
    log.header({"a": "b"})
    err = capsys.readouterr().err
    assert err == "dflash: nobody reads the output (Broken pipe); the run goes on\n"
