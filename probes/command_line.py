"""The command-line conventions of all probes: one-line usage errors, nearest names, `--json`, exit codes.

Exit codes: 0 clean, 1 a finding (or the watched program itself failed), 2 bad use. A report goes to stdout after
whatever the watched program printed (but before its atexit functions); with `--json` it is one line, the last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

CLEAN, FINDING, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageProblem(ValueError):
    """Bad use of a probe, said in one line: what was expected, what was got, what to do."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest candidate, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class ProbeParser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line, exit 2, with the nearest option offered."""

    def error(self, message: str) -> NoReturn:
        offer = ""
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0]
            offer = nearest(unknown, self._option_string_actions)
        self.exit(USAGE, f"{self.prog}: {message}{offer} (see --help)\n")


def probe_parser(name: str, purpose: str, example: str) -> ProbeParser:
    """A parser for `python -m probes.<name>` with `--json` and an example in its help."""
    parser = ProbeParser(
        prog=f"python -m probes.{name}",
        description=purpose,
        epilog=f"example:\n  {example}\n\nexit codes: 0 clean, 1 finding, 2 bad use",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON, last on stdout")
    return parser


def split_target(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The probe's own words and the program's, cut at the first `--`; None when there is no `--`."""
    words = list(argv)
    if "--" not in words:
        return words, None
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a probe's main and leave with its exit code; bad use and a torch that is not supported are one line, exit 2.

    Ctrl-C while no program is watched is one line, exit 130; a reader that has gone changes nothing.
    """
    name = sys.argv[0].rsplit("/", 1)[-1].removesuffix(".py")
    try:
        code = main(sys.argv[1:] if argv is None else argv)
        flush_stdout()
    except UsageProblem as problem:
        code = _complain(name, problem)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except _unsupported_torch() as problem:
        code = _complain(name, problem)
    sys.exit(code)


def _complain(name: str, problem: Exception) -> int:
    print(f"{name}: {' '.join(str(problem).split())}", file=sys.stderr)
    return USAGE


def _unsupported_torch() -> type[Exception] | tuple[()]:
    """UnsupportedTorch where something imported it: a probe that reads another process does without torch."""
    names = sys.modules.get("probes.torch_internals.names")
    return names.UnsupportedTorch if names is not None else ()


def flush_stdout() -> None:
    """Flush stdout; when it is closed or its reader has gone, what is left to say goes nowhere."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Point the descriptor of stdout at nothing, so that Python's own flush at its end does not fail either."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def print_json(report: Any, *, after_program: bool = False) -> None:
    """Print a report (a dataclass or plain data) as one line of JSON.

    `after_program`: a line break goes before it, since the program may have left its last line open.
    """
    text = json.dumps(as_plain(report), sort_keys=False, allow_nan=False)
    try:
        print(f"\n{text}" if after_program else text, flush=True)
    except BrokenPipeError:
        _drop_stdout()


class _ReportConsole(Console):
    """A console whose reader may go: the exit code still says what was found.

    Names of threads, functions and settings are shown as they are: in rich's markup they could mean something.
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__(width=width, markup=False, emoji=False, highlight=False)

    def on_broken_pipe(self) -> None:
        """Stay silent from here on."""
        self.quiet = True
        _drop_stdout()


def console() -> Console:
    """Where tables go: stdout, 120 columns or more where it is no terminal, so that a redirected report is not cut.

    Characters that the locale's encoding lacks are written as escapes from here on.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    found = _ReportConsole()
    return found if found.is_terminal else _ReportConsole(max(found.width, 120))


def table(title: str, *columns: str) -> Table:
    """A table whose cells are folded, never cut, on a narrow terminal."""
    made = Table(title=title or None)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def as_plain(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings as JSON can hold them; anything else as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return as_plain(value.value)
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no nan and no infinity
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
