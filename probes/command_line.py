"""The command-line conventions of all probes: one-line usage errors, nearest names, `--json`, exit codes.

Exit codes: 0 clean, 1 a finding (or the watched program itself failed), 2 bad use. A report goes to stdout after
whatever the watched program printed; with `--json` it is one line, the last one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from rich.console import Console

CLEAN, FINDING, USAGE = 0, 1, 2


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
    """Run a probe's main and leave with its exit code; a UsageProblem becomes one line on stderr and exit 2."""
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except UsageProblem as problem:
        print(f"{sys.argv[0].rsplit('/', 1)[-1].removesuffix('.py')}: {problem}", file=sys.stderr)
        code = USAGE
    sys.stdout.flush()
    sys.exit(code)


def print_json(report: Any) -> None:
    """Print a report (a dataclass or plain data) as one line of JSON."""
    print(json.dumps(as_plain(report), sort_keys=False), flush=True)


def console() -> Console:
    """Where tables go: stdout, 120 columns or more, so that a redirected report is not cut."""
    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, 120))


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
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
