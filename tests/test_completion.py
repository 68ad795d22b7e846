"""Shell completion: a real bash completes verbs and options; the words are those that the verbs take."""

import shutil
import subprocess

import pytest

from dflash.cli import VERBS, main
from dflash.completion import script, words
from dflash.errors import ConfigError


def completed(*typed: str) -> list[str]:
    """What bash offers for the last of the typed words."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    array = " ".join(f"'{word}'" for word in typed)
    state = f"COMP_WORDS=({array}); COMP_CWORD={len(typed) - 1}"
    asked = f'{script("bash")}\n{state}; _dflash; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([bash, "--norc", "-c", asked], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_verbs_options_and_groups() -> None:
    assert completed("dflash", "tr") == ["train"]
    assert completed("dflash", "train", "--optim.l") == ["--optim.lr"]
    assert completed("dflash", "doctor", "att") == ["attention"]
    assert "--max-new-tokens" in completed("dflash", "evaluate", "--")
    assert completed("dflash", "evaluate", "--optim.l") == []


def test_every_verb_has_its_words() -> None:
    assert set(words()) == set(VERBS)


def test_the_script_for_fish_names_each_option_once() -> None:
    lines = script("fish").splitlines()
    assert len(lines) == len(set(lines))
    assert any("from train" in line and line.endswith("-l steps") for line in lines)


def test_another_shell_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        script("tcsh")
    assert main(["--completion", "tcsh"]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err


def test_without_a_shell_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion"]) == 0
    assert "source <(dflash --completion bash)" in capsys.readouterr().out
