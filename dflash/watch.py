"""The verb `dflash watch`: follows a run from another terminal by reading its directory; changes nothing there."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.live import Live

from dflash.command_line import parse_required
from dflash.errors import CheckpointError, ConfigError
from dflash.live_view import Standing, step_text, view

HELP = """\
Follow a run from another terminal, whether it goes on or has ended; ctrl-c stops the watching, not the run.

examples:
  dflash watch runs/default
  dflash watch runs/default --once
"""


@dataclass(frozen=True)
class WatchOptions:
    """What `dflash watch` follows."""

    # directory of the run
    run: tyro.conf.Positional[Path]
    # seconds between looks
    interval_s: float = 1.0
    # show where the run stands, and end
    once: bool = False


class Tail:
    """Reads what was added to a metrics file since the last look; starts anew when a resumed run has cut it."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist yet."""
        self._path = path
        self._offset, self._inode = 0, 0

    def records(self) -> Iterator[dict[str, Any]]:
        """New whole lines; one that is still being written is left for the next look."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._offset, self._inode = 0, status.st_ino
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a kill in the middle of a write; its step comes again


def main(words: list[str]) -> int:
    """Parses and follows; returns 0 when the run has ended, or after one look with --once."""
    options = parse_required(WatchOptions, words, prog="dflash watch", description=HELP)
    if not options.interval_s > 0:
        raise ConfigError("seconds above 0", str(options.interval_s), "change the value", where="--interval-s")
    from dflash.log import stdout_console

    return follow(options, stdout_console())


def follow(options: WatchOptions, console: Console) -> int:
    """Shows the run until it has ended: one place on a terminal, lines elsewhere. CheckpointError: it is no run."""
    standing, tail = Standing(total_steps=_total_steps(options.run)), Tail(options.run / "metrics.jsonl")
    if options.once or not console.is_terminal:
        return _lines(options, console, standing, tail)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            for record in tail.records():
                standing.take(record)
            ended = _ended(options.run)
            standing.stage = "finished" if ended else standing.stage
            live.update(view(standing, console.width), refresh=True)
            if ended:
                return 0
            time.sleep(options.interval_s)


def _lines(options: WatchOptions, console: Console, standing: Standing, tail: Tail) -> int:
    """A line a look, when there is something new."""
    while True:
        found = list(tail.records())
        for record in found:
            standing.take(record)
            if record["kind"] == "eval":
                console.print(f"step {record['step']}  held-out tau {record['tau']:.3f}", markup=False)
        if found and standing.step:
            total = f"/{standing.total_steps}" if standing.total_steps else ""
            text = step_text(standing.step, standing.left_s)
            console.print(f"step {standing.step['step']}{total}  {text}", markup=False)
        if _ended(options.run):
            console.print(f"finished: dflash report {options.run}", markup=False)
            return 0
        if options.once:
            return 0
        time.sleep(options.interval_s)


def _total_steps(run: Path) -> int | None:
    """Steps the run was asked to make; CheckpointError when the directory is no run."""
    try:
        steps: int | None = json.loads((run / "config.json").read_text(encoding="utf-8"))["config"]["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = "no config.json of a run" if run.is_dir() else "no such directory"
        remedy = "give the --output of a `dflash train`"
        raise CheckpointError("a run's directory", got, remedy, where=str(run)) from error
    return steps


def _ended(run: Path) -> bool:
    """The closing evaluation is written last; one that is older than the configuration is of an earlier run."""
    evaluation = run / "evaluation.json"
    return evaluation.is_file() and evaluation.stat().st_mtime >= (run / "config.json").stat().st_mtime
