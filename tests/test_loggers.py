"""Loggers: every record to each of them, curves only where curves belong, one line when a package is missing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dflash import loggers
from dflash.cli import main
from dflash.config import TrainConfig
from dflash.errors import ConfigError
from dflash.loggers import check_loggers, open_loggers, scalars
from dflash.metrics_file import read
from dflash.run_directory import RunDirectory
from dflash.train import train
from tests.test_cli import small_words
from tests.training import quiet_log, small_config, unchanged


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, dict[str, Any]]] = []
        self.closed = False

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        self.records.append((kind, step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_numbers_become_curves_by_kind_and_events_become_none() -> None:
    values = {"loss": 2, "best": True, "reason": "x", "conditional_acceptance": (0.5, 0.25), "of": {"drafter": 3.0}}
    assert scalars("step", values) == {
        "train/loss": 2.0,
        "train/conditional_acceptance/1": 0.5,
        "train/conditional_acceptance/2": 0.25,
        "train/of/drafter": 3.0,
    }
    assert list(scalars("eval", {"tau": 2.0, "speedup": None})) == ["heldout/tau"]
    assert scalars("late_compile", {"seconds": 2.0}) == {}


def test_every_record_goes_to_the_file_and_to_what_is_shown(tmp_path: Path) -> None:
    shown = Kept()
    with open_loggers((), RunDirectory(tmp_path), {}, shown) as all_of_them:
        all_of_them.write("step", 1, {"loss": 2.0})
        all_of_them.sync()
    assert shown.records == [("step", 1, {"loss": 2.0})]
    assert read(tmp_path / "metrics.jsonl") == [{"kind": "step", "step": 1, "loss": 2.0}]


def test_loggers_are_closed_when_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr(loggers, "TensorBoard", lambda directory: kept)

    def fails() -> None:
        with open_loggers(("tensorboard",), RunDirectory(tmp_path), {}, Kept()) as all_of_them:
            all_of_them.write("step", 1, {"loss": 2.0})
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert kept.closed
    assert kept.records == [("step", 1, {"loss": 2.0})]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_line_before_anything_is_written(
    name: str, tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    words = [*small_words(tmp_path, tiny_target_dir), "--loggers", name]
    with unchanged(tmp_path):
        assert main(words) == 2
    err = capsys.readouterr().err
    assert f"expected the package {name}, got none; install it: pip install 'dflash[{name}]'" in err
    assert err.count("\n") == 1


def test_a_package_that_is_there_is_no_error() -> None:
    check_loggers([])
    check_loggers(["json"])
    with pytest.raises(ConfigError):
        check_loggers(["no_such_package_anywhere"])


def with_loggers(tmp_path: Path, target: Path, *names: Any) -> TrainConfig:
    return small_config(tmp_path, target, loggers=names, steps=2)


def test_tensorboard_gets_the_curves_of_a_real_run(tmp_path: Path, tiny_target_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = with_loggers(tmp_path, tiny_target_dir, "tensorboard")
    assert train(config, quiet_log()) == 0
    events = EventAccumulator(str(config.output / "tensorboard"))
    events.Reload()
    losses = [record["loss"] for record in read(config.output / "metrics.jsonl", "step")]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)
    assert events.Scalars("heldout/tau")


def test_weights_and_biases_stays_offline_and_within_the_run(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    seen: dict[str, Any] = {}
    kept = Kept()

    class Run:
        def log(self, values: dict[str, float]) -> None:
            kept.write("log", int(values["step"]), values)

        def finish(self, quiet: bool) -> None:
            kept.close()

    def init(**options: Any) -> Run:
        seen.update(options)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    config = with_loggers(tmp_path, tiny_target_dir, "wandb")
    assert train(config, quiet_log()) == 0
    assert seen["mode"] == "offline"
    assert Path(seen["dir"]) == config.output
    assert json.dumps(seen["config"], default=str)
    assert [step for _, step, values in kept.records if "train/loss" in values] == [1, 2]
    assert kept.closed
    monkeypatch.setenv("WANDB_MODE", "disabled")
    loggers.WeightsAndBiases(tmp_path, {})
    assert seen["mode"] == "disabled"


def test_quiet_prints_nothing_and_logs_the_same(
    tmp_path: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*small_words(tmp_path, tiny_target_dir), "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert len(read(tmp_path / "run" / "metrics.jsonl", "step")) == 8


def test_a_step_logs_the_acceptance_of_every_slot(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = with_loggers(tmp_path, tiny_target_dir)
    assert train(config, quiet_log()) == 0
    record = read(config.output / "metrics.jsonl", "step")[-1]
    assert len(record["conditional_acceptance"]) == config.drafter.block_size - 1
    assert all(0 <= share <= 1 for share in record["conditional_acceptance"])
