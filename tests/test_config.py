"""The configuration: presets, files, the command line, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.command_line import option_names, read_saved, read_toml, training_config
from dflash.config import FREE_ON_RESUME, PRESETS, OptimOptions, TrainConfig, same_training, validate
from dflash.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_passes_validation(name: str) -> None:
    assert validate(PRESETS[name]) is PRESETS[name]


def test_the_paper_preset_has_the_papers_numbers() -> None:
    config = training_config(["--preset", "paper"])
    drafter, optim = config.drafter, config.optim
    assert (drafter.layers, drafter.block_size, drafter.max_anchors, config.data.row_tokens) == (5, 16, 512, 3072)
    assert (optim.lr, optim.warmup, optim.clip, optim.epochs) == (6e-4, 0.04, 1.0, 6)
    assert config.objective.name == "ce"


def test_the_case_preset_has_blocks_of_32_and_soft_labels() -> None:
    config = training_config(["--preset", "case"])
    assert (config.drafter.block_size, config.drafter.max_anchors, config.data.row_tokens) == (32, 64, 2000)
    assert (config.objective.name, config.objective.gamma) == ("kl", 10.0)


def test_a_file_overrides_the_preset_and_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "steps = 7\n[optim]\nlr = 0.5\nbetas = [0.8, 0.9]\n[data]\npack = false\n")
    config = training_config(["--preset", "case", "--config", str(file), "--optim.lr", "0.25"])
    assert config.optim.lr == 0.25
    assert (config.steps, config.optim.betas, config.data.pack) == (7, (0.8, 0.9), False)
    assert config.drafter.block_size == 32


def test_dotted_and_dashed_keys_mean_the_same_as_tables(tmp_path: Path) -> None:
    dotted = write(tmp_path / "a.toml", "optim.lr = 0.5\ndata.batch-rows = 3\n")
    tables = write(tmp_path / "b.toml", "[optim]\nlr = 0.5\n[data]\nbatch_rows = 3\n")
    assert read_toml(dotted, TrainConfig()) == read_toml(tables, TrainConfig())


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("[optim]\nlrr = 1\n", ["optim.lrr", "did you mean optim.lr?"]),
        ("stepz = 1\n", ["stepz", "did you mean steps?"]),
        ("[optim]\nlr = 'fast'\n", ["optim.lr", "a number", "fast"]),
        ("[objective]\nname = 'klx'\n", ["objective.name", "did you mean kl?"]),
        ("steps = = 1\n", ["expected TOML", "line 1"]),
        ("optim = 3\n", ["expected a configuration key", "got optim"]),
    ],
)
def test_a_bad_file_names_itself_the_key_and_the_remedy(tmp_path: Path, text: str, fragments: list[str]) -> None:
    file = write(tmp_path / "bad.toml", text)
    with pytest.raises(ConfigError) as caught:
        training_config(["--config", str(file)])
    assert str(caught.value).startswith(str(file))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: expected a readable TOML file"):
        training_config(["--config", "nowhere.toml"])


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--stepss", "4"], ["--stepss", "did you mean --steps?"]),
        (["--lr", "1"], ["did you mean --optim.lr?"]),
        (["--optm.lr=1"], ["--optm.lr", "did you mean --optim.lr?"]),
        (["--no-pack"], ["did you mean --data.no-pack?"]),
        (["--zzzzzz"], ["--zzzzzz", "--help"]),
        (["stray"], ["'stray'"]),
        (["--steps", "many"], ["--steps", "a whole number", "'many'"]),
        (["--optim.lr", "fast"], ["--optim.lr", "a number", "'fast'"]),
        (["--optim.betas", "0.9"], ["--optim.betas", "2 values", "got 1"]),
        (["--drafter.layer-ids", "1", "b"], ["--drafter.layer-ids", "whole numbers", "'1 b'"]),
        (["--objective.name", "ke"], ["--objective.name", "one of ce, kl, dpace", "'ke'"]),
        (["--steps"], ["--steps", "1 value", "got none"]),
        (["--preset", "tini"], ["--preset", "tiny, paper, case", "did you mean tiny?"]),
        (["--steps", "0"], ["--steps", "at least 1", "got 0"]),
        (["--device", "gpu"], ["--device", "cuda"]),
        (["--drafter.block-size", "1"], ["--drafter.block-size", "at least 2"]),
        (["--data.row-tokens", "8"], ["--data.row-tokens", "more tokens than a block"]),
        (["--optim.warmup", "1.5"], ["--optim.warmup", "between 0 and 1"]),
        (["--resume", "--overwrite"], ["one of --resume and --overwrite"]),
    ],
)
def test_a_bad_command_line_is_one_line_with_the_remedy(arguments: list[str], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        training_config(arguments)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_every_field_can_be_set_from_the_command_line() -> None:
    names = option_names(TrainConfig, negations=False)
    assert "optim.lr" in names
    assert len(names) == len(set(names)) > 35
    config = training_config(["--drafter.layer-ids", "1", "3", "--target.trust-remote-code", "--output", "x/y"])
    assert (config.drafter.layer_ids, config.target.trust_remote_code) == ((1, 3), True)
    assert config.output == Path("x/y")


def test_trust_remote_code_is_off_in_every_preset() -> None:
    assert not any(preset.target.trust_remote_code for preset in PRESETS.values())


def test_what_changes_the_curve_is_told_from_what_does_not() -> None:
    config = TrainConfig()
    assert same_training(config, replace(config, resume=True, save_every=3, output=Path("elsewhere")))
    assert not same_training(config, replace(config, optim=OptimOptions(lr=1.0)))
    assert not same_training(config, replace(config, steps=9))
    assert {field for field in FREE_ON_RESUME if not hasattr(config, field)} == set()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("seed = " + "9" * 5000, "expected TOML, got"),
        ("x = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ('loggers = ["--seed", "3"]', "loggers: expected a value, got '--seed' in a list"),
        ('output = "a\\u0000b"', "text without NUL"),
    ],
)
def test_hostile_toml_is_an_error_of_that_file(text: str, fragment: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(fragment)) as caught:
        read_toml(file, TrainConfig())
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"config": null}', '{"config": [3]}', "[" * 100000, '{"config": {"zz": 1}}']
)
def test_a_damaged_config_of_a_run_is_one_error(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", text)
    with pytest.raises(ConfigError, match=r"config\.json: expected a"):
        read_saved(file)
