"""Commands of README.md and CONTRIBUTING.md: the cheap ones are run; of the others names and options must exist."""

import contextlib
import functools
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.assets import embedded_path
from dflash.bench import BENCHES
from dflash.cli import VERBS, main

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
# seconds each, and nothing that is written outside of a temporary directory
CHEAP = ("dflash --version", "dflash --help", "dflash --completion", "python -m repro.bodies.stance")
# programs that read no options, or hand all words on
WITHOUT_HELP = ("repro.bodies.",)


def commands() -> Iterator[tuple[str, str]]:
    """(document, command) of all fenced blocks and of all code that is a command in tables and text."""
    for name in DOCUMENTS:
        if not (ROOT / name).exists():
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        fenced = re.findall(r"^```(?!python)[a-z]*\n(.*?)^```", text, re.S | re.M)
        lines = [line for block in fenced for line in block.splitlines()]
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
        for line in [*lines, *(code for code in inline if code.split()[0] in STARTS and " " in code)]:
            command = re.sub(r"\s+#.*", "", line).strip()
            if command and not command.startswith("#") and "<" not in command.replace("<(", ""):
                yield name, command


STARTS = ("dflash", "python", "pytest", "make", "source", "pip")
ALL = sorted(set(commands()))


def check(command: str) -> None:
    """Fails unless the program exists and knows every option of the command."""
    words = shlex.split(command)
    checker = {"make": _make, "dflash": _dflash, "python": _python, "pytest": _pytest, "pip": _pip, "source": _source}
    assert words[0] in checker, f"who runs {words[0]}?"
    checker[words[0]](words[1:])


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(targets)


def _dflash(words: list[str]) -> None:
    if words[0].startswith("--"):
        assert main(words) == 0
        return
    assert words[0] in VERBS, words[0]
    if words[0] == "bench":
        assert words[1] in BENCHES, words[1]
    known = help_of(tuple(words[:2] if words[0] == "bench" else words[:1]))
    for option in (word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known), f"{words[0]} has no {option}"


@functools.cache
def help_of(verb: tuple[str, ...]) -> str:
    """What --help prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*verb, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())


def _python(words: list[str]) -> None:
    assert words[0] == "-m", "only modules are run by name"
    module, own = words[1], words[2:]
    if module == "pytest":
        _pytest(own)
        return
    assert find_spec(module) is not None, module
    own = own[: own.index("--")] if "--" in own else own
    options = [word for word in own if word.startswith("-") and word != "--help"]
    if options and not module.startswith(WITHOUT_HELP):
        known = module_help(module)
        for option in options:
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known), f"{module} has no {option}"


@functools.cache
def module_help(module: str) -> str:
    """What `python -m module --help` prints."""
    done = run([sys.executable, "-m", module, "--help"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pytest(words: list[str]) -> None:
    places = [ROOT / word.split("::")[0] for word in words if "/" in word]
    missing = [str(place) for place in places if not place.exists()]
    assert missing == []
    if "-k" in words:
        chosen = words[words.index("-k") + 1].lower()
        files = [f for place in places for f in ([place] if place.is_file() else place.rglob("*.py"))]
        # a test's own name, its file's, or one of the values it is run with
        if any(place.is_relative_to(ROOT / "repro") for place in places):
            files.append(ROOT / "repro" / "expected.py")
        named = [f for f in files if chosen in f.name.lower() or chosen in f.read_text(encoding="utf-8").lower()]
        assert named, f"no test is chosen by -k {chosen}"


def _pip(words: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[([a-z,]+)\]", " ".join(words)):
        assert all(f"\n{name} = [" in text for name in extra.split(","))


def _source(words: list[str]) -> None:
    if words == [".venv/bin/activate"]:
        assert "VENV := .venv" in (ROOT / "Makefile").read_text()
        return
    inner = re.search(r"<\((.*)\)", " ".join(words))
    assert inner
    check(inner.group(1))


def run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """A child in the repository."""
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("document", "command"), ALL, ids=[f"{d}: {c[:60]}" for d, c in ALL])
def test_a_command_of_the_documents_names_programs_and_options_that_exist(
    document: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(command)


@pytest.mark.parametrize("command", [c for _, c in ALL if c.startswith(CHEAP)])
def test_a_cheap_command_of_the_documents_runs(command: str) -> None:
    words = shlex.split(command)
    words = [sys.executable, "-m", "dflash", *words[1:]] if words[0] == "dflash" else [sys.executable, *words[1:]]
    done = run(words)
    # a body says 1 when the fault shows: that is what it is for
    assert done.returncode in ((0, 1) if "repro.bodies" in command else (0,)), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "make tea",
        "dflash trian",
        "dflash train --stepss 3",
        "dflash bench speed",
        "dflash prepare --input x",
        "python -m probes.nothing",
        "python -m probes.versions --jsn",
        "pytest tests/test_nothing.py",
        "pytest tests/test_log.py -k no_such_test_anywhere",
        "pip install 'dflash[nothing]'",
        "curl example.org",
    ],
)
def test_the_check_finds_a_command_that_does_not_exist(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


def test_both_documents_are_read_and_links_lead_somewhere() -> None:
    assert {document for document, _ in ALL} == {name for name in DOCUMENTS if (ROOT / name).exists()}
    assert (ROOT / "CONTRIBUTING.md").exists()
    for name in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            assert "://" in link or (ROOT / link).exists(), f"{name}: {link}"


def test_the_python_of_the_readme_runs_on_the_embedded_target() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 1
    program = blocks[0].replace("path/to/model", str(embedded_path("target"))).replace("248070", "3")
    program = program.replace("[1, 16, 31, 46, 61]", "[1, 2, 3, 4, 5]")
    tokens, width, generator = 96, 192, torch.Generator().manual_seed(0)
    names: dict[str, Any] = {
        "embedding": torch.randn(2048, width, generator=generator),
        "head": None,
        "all_hidden_states": torch.randn(1, tokens, 5, width, generator=generator),
        "verifier_last_hidden": torch.randn(1, tokens, width, generator=generator),
        "input_ids": torch.randint(4, 2048, (1, tokens), generator=generator),
        "loss_mask": torch.ones(1, tokens, dtype=torch.bool),
        "lengths": torch.tensor([tokens]),
        "position_ids": torch.arange(1, tokens + 1)[None],
    }
    exec(compile(program, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    assert names["metrics"]["tau"] >= 1


def test_every_place_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = {p for p in re.findall(r"`([\w./]+)`", text) if "/" in p or p.endswith((".py", ".md"))}
    assert len(places) > 20
    # a file may be named from within its folder, where the sentence says which one
    missing = [p for p in places if not any(any(ROOT.glob(f"{above}{p}")) for above in ("", "*/", "*/*/"))]
    assert missing == []


def test_every_name_of_code_that_contributing_names_exists() -> None:
    import dflash.attention.base as base
    import dflash.attention.select as select
    import dflash.config as config
    import dflash.doctor.base as doctor
    from probes import torch_internals

    found: list[Any] = [base.Strategy, select.STRATEGIES, config.StrategyName, torch_internals.UnsupportedTorch]
    assert all(found)
    assert is_dataclass(doctor.Check)
    for member in ("name", "leaves_open", "compile", "thread_scope", "step_scope"):
        assert member in base.Strategy.__annotations__ or hasattr(base.Strategy, member), member
