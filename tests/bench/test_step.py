"""`dflash bench step`: figures of the trainer's own step."""

import json
from pathlib import Path

import pytest

from dflash.bench.step import main
from dflash.errors import ConfigError
from tests.training import small_config


def words(tmp_path: Path, target: Path) -> list[str]:
    config = small_config(tmp_path, target)
    return [
        *("--target.path", str(target), "--data.train", config.data.train, "--data.heldout", config.data.heldout),
        *("--data.row-tokens", "128", "--drafter.layers", "1", "--drafter.block-size", "4", "--device", "cpu"),
        *("--drafter.max-anchors", "8", "--bench.steps", "3", "--bench.warmup", "1"),
    ]


def test_the_figures_are_printed_and_nothing_is_written(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words(tmp_path, tiny_target_dir), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["min_ms"] <= figures["step_ms"] <= figures["max_ms"]
    assert figures["tok_s"] > 0
    assert figures["peak_mb"] > 50
    assert (figures["steps"], figures["block_tokens"], figures["attention"]) == (3, 32, "sdpa/sdpa")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "held.jsonl"]
    assert main(words(tmp_path, tiny_target_dir)) == 0
    assert " ms a step (" in capsys.readouterr().out


def test_an_unknown_option_is_refused_on_both_sides() -> None:
    with pytest.raises(ConfigError, match="did you mean --steps"):
        main(["--bench.stepps", "3"])
    with pytest.raises(ConfigError, match=r"did you mean --optim\.lr"):
        main(["--optim.lrr", "3"])
