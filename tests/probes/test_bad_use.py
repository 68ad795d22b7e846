"""Bad use of any probe: one line that says what was expected and what to do, exit 2, and no program was run."""

import importlib
import sys
from pathlib import Path

import pytest

from probes.command_line import UsageProblem, run_command
from probes.torch_internals import UnsupportedTorch

WATCHING = {
    "compile_trace": (),
    "compiled_calls": (),
    "config_view": (),
    "fx_state": (),
    "stacks": ("--after", "1s"),
}
PROBES = (*WATCHING, "cache_audit", "overhead", "versions")


def ended(name: str, *words: str) -> int | str | None:
    """The exit code of `python -m probes.<name> *words`, in this process."""
    main = importlib.import_module(f"probes.{name}").main
    with pytest.raises(SystemExit) as leaving:
        run_command(main, words)
    return leaving.value.code


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (("scrip.py",), "did you mean 'script.py'?"),
        (("folder",), "the folder folder"),
        (("-m",), "expected a module name"),
        (("-m", "jsonn"), "did you mean 'json'?"),
        (("-m", "json.tol"), "did you mean 'json.tool'?"),
        (("-m", "xml"), "no __main__"),
        (("-m", "broken.inner"), "ZeroDivisionError"),
        (("secret.py",), "may not read"),
        ((), "got none"),
    ],
)
def test_a_program_that_cannot_be_run_is_one_line_and_exit_2(
    name: str, program: tuple[str, ...], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if name == "stacks" and not program:
        said = "expected --pid N, or --after"
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "secret.py").write_text("print('ran')")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    readable = importlib.import_module("probes.run_target").os.access
    monkeypatch.setattr("probes.run_target.os.access", lambda p, m: p.name != "secret.py" and readable(p, m))
    assert ended(name, *WATCHING[name], "--", *program) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("name", PROBES)
def test_an_unknown_option_is_one_line_with_the_nearest_and_exit_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(name, "--jsonn") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "did you mean '--json'?" in err


@pytest.mark.parametrize("name", PROBES)
def test_help_shows_an_example_and_the_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"example:\n  python -m probes.{name}" in text
    assert "2 bad use" in text


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("overhead", ("--pairs", "0"), "--pairs of 1 or more"),
        ("overhead", ("--pairs", "many"), "invalid int value"),
        ("stacks", ("--pid", "me"), "invalid int value"),
        ("fx_state", ("--watch", "nowhere_at_all:f", "--", __file__), "cannot be found"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_and_exit_2(
    name: str, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(name, *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    ("problem", "code"),
    [(UsageProblem("a\nb"), 2), (UnsupportedTorch("torch.x", "9.9"), 2), (KeyboardInterrupt(), 130)],
)
def test_bad_use_another_torch_and_ctrl_c_are_one_line_each(
    problem: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: object) -> int:
        raise problem

    monkeypatch.setattr(sys, "argv", ["/some/where/probe.py"])
    with pytest.raises(SystemExit) as leaving:
        run_command(main, [])
    assert leaving.value.code == code
    err = capsys.readouterr().err
    assert err.startswith("probe: ")
    assert err.count("\n") == 1
