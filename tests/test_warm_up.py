"""Warm-up: each width compiled once before the first step; nothing compiled later, weights and results untouched."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash.attention.locked import LockedCompile
from dflash.config import TrainConfig
from dflash.log import RunLog
from dflash.train import train
from dflash.warm_up import late_compiles
from tests.training import curve, printed, quiet_log, small_config, write_chats


def run(config: TrainConfig) -> RunLog:
    log = quiet_log()
    assert train(config, log) == 0
    return log


def cold_steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The keys of all steps that run alone, in their order."""
    keys: list[object] = []
    real = LockedCompile.step_scope

    def noted(strategy: LockedCompile, key: object) -> object:
        if key not in strategy._steps._warm:
            keys.append(key)
        return real(strategy, key)

    monkeypatch.setattr(LockedCompile, "step_scope", noted)
    return keys


@pytest.fixture
def compiled_config(tmp_path: Path, tiny_target_dir: Path) -> TrainConfig:
    return small_config(tmp_path, tiny_target_dir, attn_strategy="locked-compile", steps=3)


def test_a_warmed_up_run_has_the_same_losses_as_one_without_and_says_what_it_compiled(
    compiled_config: TrainConfig,
) -> None:
    warm = run(compiled_config)
    without = run(replace(compiled_config, output=compiled_config.output / "cold", warm_up=False))
    assert "compiled rows of 128 tokens in" in printed(warm)
    assert "compiled rows" not in printed(without)
    assert "compiled during the run" not in printed(warm)
    assert curve(compiled_config.output) == curve(compiled_config.output / "cold")


def test_every_width_of_unpacked_rows_is_cold_before_the_first_step_and_never_after(
    compiled_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [4, 25, 4, 25, 12, 4]
    chats = Path(compiled_config.data.train)
    text = "".join(write_chats(chats, 1, words).read_text() for words in lengths)
    chats.write_text(text)
    keys = cold_steps(monkeypatch)
    config = replace(compiled_config, steps=8, data=replace(compiled_config.data, pack=False))
    log = run(config)
    widths = next(line for line in printed(log).splitlines() if line.startswith("compiled rows of")).split()[3:-4]
    assert len(keys) == len(widths) > 1
    assert len(set(keys)) == len(keys)
    assert "compiled during the run" not in printed(log)


def test_a_strategy_that_compiles_nothing_has_no_warm_up(tmp_path: Path, tiny_target_dir: Path) -> None:
    log = run(small_config(tmp_path, tiny_target_dir, steps=1))
    assert "compiled rows" not in printed(log)


def test_a_compile_that_no_key_foretold_is_in_the_runs_report(
    compiled_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, widths = LockedCompile.step_scope, iter([128])

    def one_key(strategy: LockedCompile, key: object) -> object:
        del key
        next(widths, None)
        torch.compiler.reset()  # as if a guard of dynamo had failed
        return real(strategy, "the same for all")

    monkeypatch.setattr(LockedCompile, "step_scope", one_key)
    log = run(compiled_config)
    assert "compiled during the run, in MainThread" in printed(log)


def test_strategies_that_do_not_watch_report_none() -> None:
    from dflash.attention.eager import Eager

    assert late_compiles(Eager()) == ()
