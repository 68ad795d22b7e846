"""The verb `dflash doctor`: runs the groups, prints a line a check, returns the worst of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dflash.command_line import nearest, parse, split_arguments, training_config
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.doctor.base import Check

NAMES = ("machine", "attention", "target", "data", "resources")
HELP = """\
Checks before a training: each passes, warns or fails, with what to do. Takes the options of dflash train.

Exit code: 0 all pass, 1 a warning, 2 a failure or a mistake in the options. Own options: --json, --no-measure (do not
time a few steps). A group's name runs that group alone: machine, attention, target, data, resources.

examples:
  dflash doctor --preset paper
  dflash doctor attention --attn-strategy locked-compile
  dflash doctor --target.path models/Qwen3-4B --data.train chats.jsonl --json
"""
EXIT_CODES = {"pass": 0, "warn": 1, "fail": 2}
LOOKS = {"pass": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class DoctorOptions:
    """The doctor's own options; the others are those of `dflash train`."""

    # one JSON object instead of lines
    json: bool = False
    # time a few real steps
    measure: bool = True


def main(words: Sequence[str]) -> int:
    """Parses, runs, prints; returns the exit code."""
    names, rest = _group_names(words)
    short = {"--json": "--doctor.json", "--measure": "--doctor.measure", "--no-measure": "--doctor.no-measure"}
    own, others = split_arguments([short.get(word, word) for word in rest], "doctor")
    options = parse(DoctorOptions(), own, prog="dflash doctor")
    config = training_config(others, prog="dflash doctor", description=HELP)

    from dflash.doctor.base import Subject, guarded
    from dflash.doctor.groups import GROUPS

    subject = Subject(config, measure=options.measure)
    results: list[tuple[str, Check]] = []
    repeated: set[tuple[str, str]] = set()
    show = None if options.json else _printer()
    for name in names or GROUPS:
        for check in guarded(name, GROUPS[name], subject):
            # a target that cannot be loaded fails every group: once is enough
            if check.status == "fail" and (check.found, check.remedy) in repeated:
                continue
            repeated.add((check.found, check.remedy))
            results.append((name, check))
            if show is not None:
                show(name, check)
    code = max(EXIT_CODES[check.status] for _, check in results)
    if options.json:
        print(json.dumps({"exit_code": code, "checks": [{"group": name, **asdict(c)} for name, c in results]}))
    return code


def _group_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The groups named before the first option, and the rest."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    names = list(words[:count])
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"a group ({', '.join(NAMES)})", name, nearest(name, NAMES), where="dflash doctor")
    return names, list(words[count:])


def _printer() -> Callable[[str, "Check"], None]:
    """Prints one check; its group's name before the first of a group."""
    from rich.text import Text

    from dflash.log import stdout_console

    console, shown = stdout_console(), set[str]()

    def show(group: str, check: "Check") -> None:
        if group not in shown:
            shown.add(group)
            console.print(Text(group, style="bold"))
        line = Text.assemble((f"  {check.status}  ", LOOKS[check.status]), f"{check.name}: {check.found}")
        console.print(line, soft_wrap=not console.is_terminal)
        if check.remedy:
            console.print(Text(f"        do: {check.remedy}"), soft_wrap=not console.is_terminal)

    return show
