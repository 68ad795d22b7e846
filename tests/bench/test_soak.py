"""The soak's account: faults do not unbalance it, and it sees what is lost, repeated, left behind or grows."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.bench.soak import Ledger, SoakOptions, account, config_for, main, soak, trend
from dflash.config import TrainConfig
from dflash.features import FeatureSource
from tests.training import small_config


@pytest.fixture
def config(tmp_path: Path, tiny_target_dir: Path) -> TrainConfig:
    whole = config_for(tmp_path / "run")
    small = small_config(tmp_path, tiny_target_dir)
    parts = {"target": small.target, "drafter": small.drafter, "data": small.data}
    return replace(whole, save_every=3, **parts)  # type: ignore[arg-type]


def test_a_short_soak_with_many_faults_accounts_for_every_sample(config: TrainConfig) -> None:
    rows = FeatureSource.rows
    options = SoakOptions(minutes=0.15, delay_ms=5, target_fault=0.1, drafter_fault=0.02)
    result = soak(options, config)
    assert FeatureSource.rows is rows, "what was patched is put back"
    assert (result.lost, result.repeated, result.threads_left) == (0, 0, ())
    assert result.steps > 3
    assert result.target_faults > 0
    assert result.samples == 4 * result.steps


def test_the_account_sees_what_is_lost_repeated_or_left(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Ledger] = []

    def keep(ledger: Ledger, config: TrainConfig, minutes: float) -> object:
        seen.append(ledger)
        return account(ledger, config, minutes)

    monkeypatch.setattr("dflash.bench.soak.account", keep)
    assert soak(SoakOptions(minutes=0.05, delay_ms=1, target_fault=0, drafter_fault=0), config).lost == 0
    ledger = seen[0]
    dropped = ledger.used[1].pop()
    ledger.used[2].append(dropped)
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="target-7", daemon=True)
    thread.start()
    result = account(ledger, config, 0.05)
    release.set()
    thread.join()
    assert (result.lost, result.repeated, result.threads_left, result.ok) == (1, 1, ("target-7",), False)


def test_growth_over_the_second_half_is_found_and_a_warm_start_is_not_growth() -> None:
    leak = [(float(s), 100 + s / 36) for s in range(3600)]
    slope, growth = trend(leak)
    assert slope == pytest.approx(100.0)
    assert growth > 0.05
    warm = [(float(s), 100.0 + min(s, 600)) for s in range(3600)]
    assert trend(warm) == (pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6))


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "every sample accounted for" in capsys.readouterr().out
