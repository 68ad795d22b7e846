"""The verb `dflash report`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dflash.command_line import parse_required
from dflash.errors import ConfigError, OutputError

HELP = """\
One self-contained HTML page of one or more runs, finished or not: curves, acceptance by slot, throughput, compile
time line (from any *trace*.json of probes.compile_trace in the run's directory), configuration and environment.

examples:
  dflash report runs/default
  dflash report runs/first runs/second -o compared.html
"""


@dataclass(frozen=True)
class ReportOptions:
    """What `dflash report` reads and writes."""

    # directories of runs; the first one's name comes first everywhere
    runs: tyro.conf.Positional[tuple[Path, ...]]
    # the page; none: report.html in the first run's directory
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None


def main(words: list[str]) -> int:
    """Parses, reads, writes the page, prints where it is."""
    options = parse_required(ReportOptions, words, prog="dflash report", description=HELP)
    print(f"report: {write(options)}")
    return 0


def write(options: ReportOptions) -> Path:
    """Writes the page whole or not at all; returns its path. CheckpointError: not a run; OutputError: cannot write."""
    from dflash.report.page import page
    from dflash.report.run_data import read_run

    if not options.runs:
        raise ConfigError("at least one run's directory", "none", "name it: dflash report runs/default")
    text = page([read_run(path) for path in options.runs])
    output = options.output or options.runs[0] / "report.html"
    partial = output.with_name(f".partial-{output.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        got = error.strerror or str(error)
        raise OutputError("a place for the page", got, "choose another with -o", where=str(output)) from error
    return output
