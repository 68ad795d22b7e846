"""Command lines and configuration files into dataclasses; every mistake becomes one line with the nearest name."""

import contextlib
import difflib
import io
import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tyro

from dflash.config import PRESETS, TrainConfig, validate
from dflash.errors import ConfigError
from dflash.ranges import check_ranges

Options = TypeVar("Options")

DEFAULT_PRESET = "tiny"
IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "Path": "a path",
    "tuple[int, ...]": "whole numbers",
    "tuple[float, float]": "two numbers",
}


@dataclass(frozen=True)
class TrainArguments:
    """What `dflash train` reads: where the values come from, then the values."""

    # values to start from: tiny, paper or case
    preset: str = DEFAULT_PRESET
    # TOML file with some of the fields below; overrides the preset, is overridden by the command line
    config: Path | None = None
    # the options of a run
    run: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)


def training_config(arguments: Sequence[str], *, prog: str = "dflash train", description: str = "") -> TrainConfig:
    """Preset, then file, then command line. With --resume alone, the configuration of the run itself comes first.

    Raises ConfigError for unknown names and for values of the wrong kind.
    """
    preset, file = _option(arguments, "preset"), _option(arguments, "config")
    start = PRESETS.get(preset or DEFAULT_PRESET)
    if start is None:
        got = preset or ""
        raise ConfigError(f"a preset ({', '.join(PRESETS)})", got, nearest(got, PRESETS), where="--preset")
    output = Path(_option(arguments, "output") or start.output)
    saved = output / "config.json"
    if "--resume" in arguments and preset is None and file is None and saved.is_file():
        start = replace(read_saved(saved), output=output)
    if file is not None:
        start = read_toml(Path(file), start)
    parsed = parse(TrainArguments(preset or DEFAULT_PRESET, None, start), arguments, prog=prog, description=description)
    return validate(parsed.run)


def parse(default: Options, arguments: Sequence[str], *, prog: str, description: str = "") -> Options:
    """Returns `default` changed by `arguments`; prints help and exits for --help; raises ConfigError otherwise."""
    return _parse(type(default), default, arguments, prog, description)


def parse_required(kind: type[Options], arguments: Sequence[str], *, prog: str, description: str = "") -> Options:
    """The same for options of which some have no default."""
    return _parse(kind, tyro.MISSING_NONPROP, arguments, prog, description)


def _parse(kind: type[Options], default: Any, arguments: Sequence[str], prog: str, description: str) -> Options:
    boxes = io.StringIO()
    words = list(arguments)
    options: Options
    try:
        with contextlib.redirect_stderr(boxes):
            options, unknown = tyro.cli(
                kind, prog=prog, description=description, args=words, default=default, return_unknown_args=True
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _one_line(boxes.getvalue(), kind, arguments) from None
    if unknown:
        raise _unknown(unknown[0], kind)
    check_ranges(options)
    return options


def split_arguments(arguments: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """The options written `--prefix.name`, without the prefix, and all others; each keeps its values."""
    own: list[str] = []
    others: list[str] = []
    into = others
    for word in arguments:
        if word.startswith("--"):
            into = own if word.startswith(f"--{prefix}.") else others
            word = word.replace(f"--{prefix}.", "--", 1) if into is own else word
        into.append(word)
    return own, others


def option_names(kind: type[Any], prefix: str = "", *, negations: bool = True) -> list[str]:
    """Every option of a dataclass as written on the command line, without dashes in front; --no-... ones on request."""
    names: list[str] = []
    for item in fields(kind):
        inner = getattr(item.type, "__origin__", item.type)
        name = item.name.replace("_", "-")
        if is_dataclass(inner):
            assert isinstance(inner, type)
            deeper = prefix if inner is TrainConfig else f"{prefix}{name}."
            names += option_names(inner, deeper, negations=negations)
            continue
        names.append(prefix + name)
        if item.type is bool and negations:
            names.append(f"{prefix}no-{name}")
    return names


def nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    """The remedy for an unknown name: the nearest known one, or the list when none is near."""
    last_parts = {option.rsplit(".", 1)[-1]: option for option in known}
    if exact := last_parts.get(name.lstrip("-")):
        return f"did you mean {exact}?"  # only its table was left out
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close and (tail := difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last_parts), n=1, cutoff=0.7)):
        close = [last_parts[tail[0]]]
    return f"did you mean {close[0]}?" if close else "see --help for the names"


def _unknown(word: str, kind: type[Any], missing: str = "") -> ConfigError:
    """`missing`: a required option that was not given; meant by a name that is near to no other."""
    if not word.startswith("-"):
        return ConfigError("options (--name value)", repr(word), "see --help for the names")
    name = word.lstrip("-").split("=", 1)[0].replace("_", "-")
    known = {f"--{option}": option for option in option_names(kind)}
    if missing and not difflib.get_close_matches(f"--{name}", list(known), n=1, cutoff=0.8):
        return ConfigError("a known option", f"unknown option --{name}", f"did you mean {missing}?")
    return ConfigError("a known option", word.split("=", 1)[0], nearest(f"--{name}", known))


def _one_line(box: str, kind: type[Any], arguments: Sequence[str]) -> ConfigError:
    """The message tyro draws in a box, as one line that names the option, what it takes and what it got."""
    text = _inside(box)
    if match := re.search(r"invalid choice '(.*?)' for argument '(\S+)'\. Expected one of \((.*?)\)", text):
        got, name, choices = match.groups()
        listed = re.findall(r"'([^']*)'", choices)
        return ConfigError(f"one of {', '.join(listed)}", repr(got), nearest(got, listed), where=name)
    if match := re.search(r"Error parsing (\S+?):? ", text):
        name = match.group(1)
        got = " ".join(_values(arguments, name))
        return ConfigError(_wanted(name, kind), repr(got), "correct the value", where=name)
    if match := re.search(r"Missing value for argument '(\S+)'\. Expected (\d+)", text):
        name, count = match.groups()
        got = str(len(_values(arguments, name)) or "none")
        return ConfigError(f"{count} value{'s' * (count != '1')}", got, "see --help", where=name)
    if required := re.findall(r"--[a-z][\w.-]*", text):
        known = {f"--{option}" for option in option_names(kind)} | {"--help"}
        for word in arguments:
            if word.startswith("--") and word.split("=", 1)[0].replace("_", "-") not in known:
                return _unknown(word, kind, missing=required[0])
        return ConfigError("the required " + ", ".join(dict.fromkeys(required)), "nothing", "add it; see --help")
    return ConfigError("a readable command line", text, "see --help")


def _inside(box: str) -> str:
    """What a box says before it comes to help texts; borders are drawn, or left out, as the encoding has it."""
    lines = [line.strip().strip("│|").strip() for line in box.splitlines()]
    text = " ".join(line for line in lines if not re.fullmatch(r"\W*", line))
    return " ".join(re.split(r"Argument helptext:|For full helptext", text)[0].split())


def _wanted(option: str, kind: type[Any]) -> str:
    """What an option takes, in words, from its annotation."""
    names = option.lstrip("-").replace("-", "_").split(".")
    node: Any = kind
    for depth, name in enumerate(names):
        types = {item.name: item.type for item in fields(node)}
        if depth == 0 and "run" in types and name not in types:
            types = {item.name: item.type for item in fields(TrainConfig)}
        node = types.get(name, str)
    words = node.__name__ if isinstance(node, type) and not get_args(node) else str(node).replace(" | None", "")
    return IN_WORDS.get(words, words)


def _values(arguments: Sequence[str], option: str) -> list[str]:
    """What follows the last `option` up to the next one."""
    values: list[str] = []
    taking = False
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            taking = name.replace("_", "-") == option
            values = ([value] if value else []) if taking else values
        elif taking:
            values.append(word)
    return values


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The last value of --name, before the real parser has run."""
    value = None
    for here, following in zip(arguments, [*arguments[1:], None]):
        if here == f"--{name}":
            value = following
        elif here.startswith(f"--{name}="):
            value = here.split("=", 1)[1]
    return value


def read_toml(path: Path, start: TrainConfig) -> TrainConfig:
    """`start` with the fields of a TOML file; its keys are the command line's names, in tables or dotted."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8"
        raise ConfigError("a readable TOML file", str(reason), "check the path", where=str(path)) from None
    except RecursionError:
        raise ConfigError("flat TOML", "tables or lists nested too deeply", "mend the file", where=str(path)) from None
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python converts
        raise ConfigError("TOML", str(error), "mend the file", where=str(path)) from None
    return _from_tree(table, start, str(path))


def read_saved(path: Path) -> TrainConfig:
    """The configuration a run has written into its directory."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("a run's config.json", repr(error), "restore it or start anew", where=str(path)) from None
    if not isinstance(tree, dict):
        got = type(tree).__name__
        raise ConfigError("a run's config.json", f"{got} as config", "restore it or start anew", where=str(path))
    return _from_tree(tree, TrainConfig(), str(path))


def _from_tree(tree: dict[str, Any], start: TrainConfig, where: str) -> TrainConfig:
    """A file is a command line in other words: the same parser checks both."""
    known = dict.fromkeys(option_names(TrainConfig, negations=False))
    arguments: list[str] = []
    for name, value in _leaves(tree):
        _check_plain(name, value, where)
        if name not in known:
            shown = name.replace("-", "_")
            hint = nearest(name, known)
            hint = hint.replace("-", "_") if hint.startswith("did") else "see dflash train --help for the names"
            raise ConfigError("a configuration key", shown, hint, where=where)
        arguments += _as_arguments(name, value)
    try:
        return parse(start, arguments, prog=where)
    except ConfigError as error:
        place = f"{where}: {error.where.lstrip('-')}"
        raise ConfigError(error.expected, error.got, error.remedy, where=place) from None


def _check_plain(name: str, value: Any, where: str) -> None:
    """A value of a file must not be taken for another option, nor hold what no path or name can."""
    for item in value if isinstance(value, list) else ():
        if isinstance(item, str) and item.startswith("-"):
            got = f"{item!r} in a list"
            raise ConfigError("a value", got, "write options as keys", where=f"{where}: {name.replace('-', '_')}")
    if "\0" in f"{name}{value}":
        raise ConfigError("text without NUL", "a NUL in it", "mend the file", where=where)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _as_arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        table, _, last = name.rpartition(".")
        return [f"--{table}{'.' if table else ''}{'' if value else 'no-'}{last}"]
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    return [f"--{name}={value}"]
