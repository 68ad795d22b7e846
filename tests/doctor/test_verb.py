"""`dflash doctor` on real small runs: exit codes, JSON, groups; nothing is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash.cli import main
from dflash.doctor.groups import GROUPS
from dflash.doctor.verb import NAMES
from tests.test_cli import small_words
from tests.training import unchanged


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and checks by name."""
    code = main(["doctor", *words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == code
    return code, {f"{check['group']}/{check['name']}": check for check in answer["checks"]}


def small(tmp_path: Path, target: Path) -> list[str]:
    """The options of a small run, without the verb."""
    return small_words(tmp_path, target)[1:]


def test_the_doctor_looks_at_everything_and_writes_nothing(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = small(tmp_path, tiny_target_dir)
    with unchanged(tmp_path):
        code, checks = run(words, capsys)
    assert {check["group"] for check in checks.values()} == set(GROUPS)
    assert checks["target/layer ids"]["status"] == checks["target/final norm"]["status"] == "pass"
    assert checks["resources/memory"]["status"] == checks["resources/time"]["status"] == "pass"
    # a random target would not have said what the data says
    assert checks["data/teacher agreement"]["status"] == "warn"
    assert "--regenerate" in checks["data/teacher agreement"]["remedy"]
    assert code == 1


def test_a_group_runs_alone_and_all_passing_is_0(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = run(["target", *small(tmp_path, tiny_target_dir)], capsys)
    assert code == 0
    assert {check["group"] for check in checks.values()} == {"target"}


def test_a_target_that_cannot_be_loaded_is_said_once_and_is_2(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = run([*small(tmp_path, tiny_target_dir), "--target.path", "nowhere"], capsys)
    failures = [check for check in checks.values() if check["status"] == "fail"]
    assert code == 2
    assert len(failures) == 1
    assert "no such directory" in failures[0]["found"]
    assert checks["machine/torch"]["status"] == "pass"


def test_the_mask_token_in_the_data_fails(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", *small(tmp_path, tiny_target_dir), "--drafter.mask-token-id", "20"]
    code, checks = run(words, capsys)
    assert code == 2
    assert any("never occurs in the data" in check["found"] for check in checks.values())


def test_no_step_is_timed_when_not_asked_for(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = run(["resources", *small(tmp_path, tiny_target_dir), "--no-measure"], capsys)
    assert code == 0
    assert "resources/memory" in checks
    assert "resources/time" not in checks


def test_lines_name_the_group_the_result_and_the_remedy(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*small(tmp_path, tiny_target_dir), "--attn-strategy", "force-compile"]
    assert main(["doctor", "attention", *words]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attention"
    assert any(line.startswith("  warn  races: ") for line in lines)
    assert any(line.strip().startswith("do: use ") and "locked-compile" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["memory"], "a group (machine, attention"),
        (["atention"], "did you mean attention?"),
        (["--stepss", "3"], "did you mean --steps?"),
    ],
)
def test_a_mistake_in_the_options_is_one_line_and_2(
    words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert fragment in err


def test_the_names_known_without_loading_torch_are_the_groups() -> None:
    assert tuple(GROUPS) == NAMES
