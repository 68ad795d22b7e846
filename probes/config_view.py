"""What each thread of a program sees of torch's compile settings, and which settings made in main never reached it.

From torch 2.12 a setting is a context variable: made in main, it is invisible in a thread started later. Each thread is
looked at when its body ends, and the main thread when the program does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from probes import torch_internals as ti
from probes.command_line import CLEAN, FINDING, console, print_json, probe_parser, run_command, split_target, table
from probes.run_target import Outcome, find_target, program, run, show_failure

DEFAULT = "default"


@dataclass(frozen=True)
class ThreadView:
    """Settings off their default as one thread saw them at its end: full name -> repr."""

    thread: str
    native_id: int
    settings: dict[str, str]


@dataclass(frozen=True)
class Unreached:
    """A setting that the main thread has and a worker does not."""

    setting: str
    in_main: str
    thread: str
    in_thread: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.in_main} in main, {self.in_thread} in {self.thread}"


@dataclass(frozen=True)
class ConfigReport:
    """All threads' views, and what never reached the workers."""

    torch_version: str
    scope: str
    main: ThreadView
    workers: tuple[ThreadView, ...]
    unreached: tuple[Unreached, ...]
    outcome: Outcome | None = None


@dataclass
class ConfigWatch:
    """Collects the views; `report()` after the block, or inside it for the threads that have ended."""

    workers: list[ThreadView] = field(default_factory=list)
    main: ThreadView | None = None

    def look(self) -> ThreadView:
        """The calling thread's view now."""
        return ThreadView(threading.current_thread().name, threading.get_native_id(), ti.config_overrides())

    def report(self, outcome: Outcome | None = None) -> ConfigReport:
        main = self.main or self.look()
        return ConfigReport(
            torch_version=torch.__version__,
            scope="one for each thread and context" if ti.config_is_per_context() else "one for all threads",
            main=main,
            workers=tuple(self.workers),
            unreached=tuple(_unreached(main, self.workers)),
            outcome=outcome,
        )


_watching = threading.Lock()


@contextmanager
def watch_config() -> Iterator[ConfigWatch]:
    """Look at the settings of every thread that ends inside the block, and of this one at the end of the block.

    Replaces `threading.Thread.start` for the whole process, restored on leaving. Entered twice: RuntimeError.
    """
    if not _watching.acquire(blocking=False):
        raise RuntimeError("expected no other config watch, got one that is entered; leave it first")
    watch = ConfigWatch()
    original = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        # an attribute of the instance: a subclass's own `run` is wrapped as well
        self.run = _viewed(self.run, watch)  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]
        watch.main = watch.look()
        _watching.release()


def _viewed(body: Callable[[], Any], watch: ConfigWatch) -> Callable[[], None]:
    def run_and_look() -> None:
        try:
            body()
        finally:
            watch.workers.append(watch.look())

    return run_and_look


def _unreached(main: ThreadView, workers: Sequence[ThreadView]) -> Iterator[Unreached]:
    for worker in workers:
        for setting, value in main.settings.items():
            seen = worker.settings.get(setting, DEFAULT)
            if seen != value:
                yield Unreached(setting, value, worker.thread, seen)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = probe_parser(
        "config_view",
        "Show what each thread of a program sees of the dynamo, inductor and functorch settings; "
        "exit 1 when a setting made in main did not reach a thread.",
        "python -m probes.config_view -- train.py --steps 10",
    )
    own, words = split_target(argv)
    options = parser.parse_args(own)
    target = find_target(words)
    with watch_config() as watch, program(target, lambda outcome: _reported(watch, outcome, as_json=options.json)):
        outcome = run(target)
    return _reported(watch, outcome, as_json=options.json)


def _reported(watch: ConfigWatch, outcome: Outcome, *, as_json: bool) -> int:
    report = watch.report(outcome)
    if as_json:
        print_json(report, after_program=True)
    else:
        _show(report)
        show_failure(outcome)
    return FINDING if report.unreached or outcome.failed else CLEAN


def _show(report: ConfigReport) -> None:
    out = console()
    out.print(f"torch {report.torch_version}: settings are {report.scope}")
    rows = table("", "thread", "tid", "settings off their default")
    for view in (report.main, *report.workers):
        words = ", ".join(f"{name} = {value}" for name, value in view.settings.items())
        rows.add_row(view.thread, str(view.native_id), words or "none")
    out.print(rows)
    for unreached in report.unreached:
        out.print(f"never reached: {unreached}", soft_wrap=True)
    out.print(f"{len(report.unreached)} settings made in main did not reach a thread", style="bold")


if __name__ == "__main__":
    run_command(main)
