"""What a run shows: a live bar on a terminal, plain lines elsewhere, tables at the start and the end."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

# seconds between plain lines: a log file of a long run stays readable
PLAIN_INTERVAL_S = 5.0
# columns of what is written to a file
PLAIN_WIDTH = 200


@dataclass(frozen=True)
class StepLine:
    """One optimizer step, as it is shown and as it is written to metrics.jsonl."""

    step: int
    epoch: int
    # sum(w * l) / sum(w) over the whole step
    loss: float
    # share of supervised slots whose token is right
    accuracy: float
    # mean matched prefix + 1 over the training blocks (teacher-forced, not speculative decoding)
    tau: float
    learning_rate: float
    grad_norm: float
    # blocks trained on
    anchors: int
    # context tokens, padding not counted
    tokens: int
    step_ms: float
    # context tokens a second
    tok_s: float


class RunLog:
    """Everything a run prints. `live` shows a bar on a terminal; without one, a line now and then."""

    def __init__(self, console: Console | None = None, *, plain_interval_s: float = PLAIN_INTERVAL_S) -> None:
        """Prints to `console`, by default standard output."""
        self.console = console or stdout_console()
        self._interval_s = plain_interval_s
        self._last_line_s = float("-inf")
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._seconds_a_step = 0.0

    def header(self, rows: Mapping[str, str]) -> None:
        """What runs, on what, and why."""
        self.table("", [], [[name, value] for name, value in rows.items()])

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; without `columns` it has no heading."""
        table = Table(*columns, title=title or None, show_header=bool(columns), title_justify="left", box=None)
        if not columns:
            table.add_column(style="bold")
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def line(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, markup=False)

    @contextmanager
    def live(self, total_steps: int, done: int) -> Iterator[None]:
        """The time in which steps are shown; the terminal is given back on exit."""
        self._total = total_steps
        if not self.console.is_terminal:
            yield
            return
        columns = [TextColumn("{task.fields[stage]:<10}"), BarColumn(30), MofNCompleteColumn()]
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=self.console) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=total_steps, completed=done, stage="start", text="")
            try:
                yield
            finally:
                self._progress = None

    def stage(self, name: str) -> None:
        """What the run does now."""
        if self._progress is not None:
            self._progress.update(self._task, stage=name)

    def part(self, name: str, done: int, total: int) -> None:
        """How far a long part of the run (an evaluation, the preparation) is."""
        if self._progress is not None:
            self._progress.update(self._task, stage=f"{name} {done}/{total}")

    def step(self, line: StepLine) -> None:
        """Shows one optimizer step."""
        seconds = line.step_ms / 1e3
        # a running mean: the estimate must not jump with every evaluation or slow step
        self._seconds_a_step = seconds if not self._seconds_a_step else 0.95 * self._seconds_a_step + 0.05 * seconds
        text = self._text(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=line.step, stage="train", text=text)
        elif self._is_due(line.step):
            self.line(f"step {line.step}/{self._total}  {text}")

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        due = step in (1, self._total) or now - self._last_line_s >= self._interval_s
        if due:
            self._last_line_s = now
        return due

    def _text(self, line: StepLine) -> str:
        left = (self._total - line.step) * self._seconds_a_step
        return (
            f"loss {line.loss:.3f}  acc {line.accuracy:.3f}  tau {line.tau:.2f}  lr {line.learning_rate:.2e}  "
            f"{line.tok_s / 1e3:.2f} ktok/s  eta {duration(left)}"
        )


def stdout_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough not to fold in a file."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
