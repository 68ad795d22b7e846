"""What a run shows: a live view on a terminal, plain lines elsewhere, tables at the start and the end."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash.live_view import Standing, duration, step_text, view

__all__ = ["RunLog", "StepLine", "duration", "stdout_console"]

# seconds between plain lines: a log file of a long run stays readable
PLAIN_INTERVAL_S = 5.0
# columns of what is written to a file
PLAIN_WIDTH = 200
REFRESHES_A_SECOND = 5


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
    # for slot k = 1..K-1: share of right tokens where all earlier slots were right (teacher-forced too)
    conditional_acceptance: tuple[float, ...] = ()


class RunLog:
    """Everything a run prints. `live` shows where it stands on a terminal; without one, a line now and then."""

    def __init__(
        self, console: Console | None = None, *, plain_interval_s: float = PLAIN_INTERVAL_S, quiet: bool = False
    ) -> None:
        """Prints to `console`, by default standard output; quiet: nothing at all, errors excepted."""
        self.console = console or stdout_console()
        self.console.quiet = self.console.quiet or quiet
        self._interval_s = plain_interval_s
        self._last_line_s = float("-inf")
        self._live: Live | None = None
        self.standing = Standing()

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
        self._print(table)

    def line(self, text: str) -> None:
        """One line that stays."""
        self._print(Text(text))

    def _print(self, what: RenderableType) -> None:
        """A reader that goes away (`| head`, a closed terminal) does not end a training."""
        try:
            self.console.print(what)
        except OSError as error:
            self.console.quiet = True
            if self.console.file is sys.stdout:
                # what is left in its buffer would fail again when the interpreter ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            with suppress(OSError):
                print(f"dflash: nobody reads the output ({error.strerror}); the run goes on", file=sys.stderr)

    @contextmanager
    def live(self, total_steps: int, done: int) -> Iterator[None]:
        """The time in which steps are shown; the terminal is given back on exit."""
        self.standing = Standing(total_steps=total_steps, done=done)
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        # asked for by the display's own thread: a step only changes numbers, and never waits for the terminal
        shown = Live(console=self.console, get_renderable=self._view, refresh_per_second=REFRESHES_A_SECOND)
        with shown:
            self._live = shown
            try:
                yield
            finally:
                self._live = None

    def stage(self, name: str) -> None:
        """What the run does now."""
        self.standing.stage = name

    def part(self, name: str, done: int, total: int) -> None:
        """How far a long part of the run (an evaluation, the preparation) is."""
        self.standing.stage = f"{name} {done}/{total}"

    def step(self, line: StepLine) -> None:
        """Shows one optimizer step."""
        self.write("step", line.step, asdict(line))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """A record of the run, as every logger takes it: changes what is shown."""
        record = {**values, "kind": kind, "step": step}
        self.standing.take(record)
        if kind == "step" and self._live is None and self._is_due(step):
            self.line(f"step {step}/{self.standing.total_steps}  {step_text(record, self.standing.left_s)}")

    def close(self) -> None:
        """Nothing is buffered."""

    def _view(self) -> RenderableType:
        return view(self.standing, self.console.width)

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        due = step in (1, self.standing.total_steps) or now - self._last_line_s >= self._interval_s
        if due:
            self._last_line_s = now
        return due


class PlainErrors(Console):
    """A console whose broken pipe is an exception like any other; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the BrokenPipeError."""
        raise


def stdout_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough not to fold in a file."""
    return PlainErrors(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
