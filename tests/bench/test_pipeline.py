"""`dflash bench pipeline`: the three runs, the ideal's rule, and that nothing is written."""

import json
import os
from pathlib import Path

import pytest
import torch

from dflash.bench.pipeline import ideal_of, main
from dflash.errors import ConfigError
from dflash.pipeline.placement import Placement
from tests.training import small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def words(tmp_path: Path, target: Path) -> list[str]:
    config = small_config(tmp_path, target)
    return [
        *("--target.path", str(target), "--data.train", config.data.train, "--data.heldout", config.data.heldout),
        *("--data.row-tokens", "128", "--drafter.layers", "1", "--drafter.block-size", "4", "--device", "cpu"),
        *("--drafter.max-anchors", "8", "--bench.steps", "4", "--bench.warmup", "1", "--bench.repeats", "1"),
    ]


def test_both_sides_and_the_whole_are_measured_and_nothing_is_written(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*words(tmp_path, tiny_target_dir), "--targets", "cpu,cpu", "--drafters", "cpu"]
    assert main([*arguments, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert min(figures[name] for name in ("target_tok_s", "drafter_tok_s", "tok_s", "simulated_tok_s")) > 0
    assert figures["efficiency"] == pytest.approx(figures["tok_s"] / figures["ideal_tok_s"])
    assert figures["bottleneck"] in ("targets", "drafters", "neither")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "held.jsonl"]


def test_without_threads_there_is_nothing_to_measure(tmp_path: Path, tiny_target_dir: Path) -> None:
    with pytest.raises(ConfigError, match="expected --targets and --drafters"):
        main(words(tmp_path, tiny_target_dir))


def test_the_ideal_is_the_slower_side_or_both_in_turn_where_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert ideal_of(Placement((CPU,), (CPU,), True), 100.0, 50.0)[0] == 50.0
    assert ideal_of(Placement((CPU, CPU), (CPU,), True), 100.0, 100.0)[0] == pytest.approx(50.0)
    assert ideal_of(Placement((GPU,), (GPU,), True), 300.0, 150.0)[0] == pytest.approx(100.0)
    other = torch.device("cuda", 1)
    assert ideal_of(Placement((GPU,), (other,), True), 300.0, 150.0)[0] == 150.0
