"""Numbers from users: finite, in range, or one line that names the option; every numeric option has a range."""

import math
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dflash.cli import main
from dflash.config import EvaluateConfig, GenerateConfig, TrainConfig, validate
from dflash.data.options import PrepareOptions
from dflash.errors import ConfigError
from dflash.ranges import RANGES, RANGES_OF, check_ranges

# token and layer ids are checked against the target, betas as a pair
CHECKED_ELSEWHERE = {"drafter.mask-token-id", "drafter.layer-ids", "optim.betas"}


def numeric_options(node: Any, prefix: str = "") -> list[str]:
    names = []
    for item in fields(node):
        name, value = prefix + item.name.replace("_", "-"), getattr(node, item.name)
        if is_dataclass(value):
            names += numeric_options(value, f"{name}.")
        elif any(word in str(item.type) for word in ("int", "float")) and not re.search("Literal|bool", str(item.type)):
            names.append(name)
    return names


@pytest.mark.parametrize(
    "options", [TrainConfig(), EvaluateConfig(Path("x")), GenerateConfig(Path("x"), "hi"), PrepareOptions("x")]
)
def test_every_numeric_option_has_a_range(options: Any) -> None:
    known = RANGES.keys() | CHECKED_ELSEWHERE | RANGES_OF.get(type(options).__name__, {}).keys()
    assert numeric_options(options)
    assert not set(numeric_options(options)) - known


def put(node: Any, name: str, value: float) -> Any:
    """`node` with the option `name` set to `value`."""
    first, _, rest = name.replace("-", "_").partition(".")
    return replace(node, **{first: put(getattr(node, first), rest, value) if rest else value})


ABSURD = [-(10**25), 10**25, 10**4999, math.nan, -math.inf]


@pytest.mark.parametrize("option", sorted(set(numeric_options(TrainConfig())) - CHECKED_ELSEWHERE))
def test_an_absurd_number_is_an_error_that_names_the_option(option: str) -> None:
    for value in ABSURD:
        if isinstance(value, int) and option in ("objective.gamma", "optim.clip") and value > 0:
            continue  # no upper limit: it means "off"
        with pytest.raises(ConfigError, match=f"^--{option}: expected a (share|whole number|number) ") as caught:
            validate(put(TrainConfig(), option, value))
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps", "0"), ("drafter.max-anchors", "1" + "0" * 25), ("optim.weight-decay", "inf"), ("watchdog", "1e400")],
)
def test_an_absurd_number_on_the_command_line_is_one_line_and_writes_nothing(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--output", str(tmp_path / "run"), f"--{option}={value}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"dflash: --{option}: expected ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--drafter", "x", "--limit", "-1"],
        ["evaluate", "--drafter", "x", "--max-new-tokens", "0"],
        ["generate", "--drafter", "x", "--prompt", "hi", "--temperature", "nan"],
        ["generate", "--drafter", "x", "--prompt", "hi", "--seed", str(2**64)],
        ["prepare", "--data", "x", "--preview", "1", "--limit", "0"],
        ["bench", "step", "--bench.steps", "0"],
    ],
)
def test_the_other_verbs_check_their_numbers_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert words[-2].replace("bench.", "") in err
    assert err.count("\n") == 1


def test_numbers_that_make_sense_pass() -> None:
    config = TrainConfig(seed=-1)
    assert validate(config) is config
    check_ranges(replace(config, objective=replace(config.objective, gamma=float("inf"))))
    with pytest.raises(ConfigError, match="got one of more than 38 digits"):
        check_ranges(replace(config, steps=10**5000))


@pytest.mark.parametrize("device", ["cuda:" + "9" * 20, "mps", "cuda:-1", "", "cuda:0,cuda:1"])
def test_a_device_that_cannot_be_is_one_line(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--output", str(tmp_path / "run"), f"--device={device}"]) == 2
    assert "--device: expected cpu, cuda, cuda:N or auto" in capsys.readouterr().err


def test_an_empty_list_of_layers_is_not_the_default(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--output", str(tmp_path / "run"), "--target.path", str(tiny_target_dir), "--device", "cpu"]
    assert main([*words, "--drafter.layer-ids"]) == 2
    assert "expected layer ids in 0..5, got none" in capsys.readouterr().err
