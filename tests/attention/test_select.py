"""Choosing a strategy and a kernel: reasons are given, requests never quietly changed."""

import pytest
import torch

from dflash.attention.select import STRATEGIES, Workload, choose
from dflash.errors import StrategyError


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_every_strategy_runs_on_cpu_with_the_sdpa_kernel_and_says_why(strategy: str) -> None:
    backend = choose(strategy, "auto", "cpu")
    assert backend.kernel == "sdpa"
    assert backend.strategy.name == ("sdpa" if strategy == "auto" else strategy)
    assert "sdpa" in str(backend)
    assert backend.reason in str(backend)


def test_auto_takes_flex_on_cuda_by_threads_and_version_and_a_dense_mask_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_cuda(threads: int, version: str) -> str:
        monkeypatch.setattr(torch, "__version__", version)
        backend = choose("auto", "auto", "cuda", workload=Workload(threads))
        assert (backend.kernel, backend.mask) == ("flex", "blocks")
        assert str(threads) in backend.reason or version in backend.reason or threads == 1
        return backend.strategy.name

    cpu = choose("auto", "auto", "cpu", workload=Workload(3))
    assert (cpu.strategy.name, cpu.kernel, cpu.mask) == ("sdpa", "sdpa", "tiles")
    assert on_cuda(1, "2.13.0") == "locked-compile"
    assert on_cuda(3, "2.13.0") == "isolated"
    assert on_cuda(3, "2.12.1") == "locked-compile"


def test_compiled_sdpa_gets_a_dense_mask_because_tiles_have_other_widths_in_each_step() -> None:
    assert choose("locked-compile", "auto", "cpu").mask == "dense"
    assert choose("sdpa", "auto", "cuda").mask == "dense"


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_training_with_flex_on_cpu_is_refused_whatever_the_strategy(strategy: str) -> None:
    with pytest.raises(StrategyError, match="flex"):
        choose(strategy, "flex", "cpu")


def test_flex_on_cpu_is_allowed_without_gradients() -> None:
    assert choose("eager", "flex", "cpu", workload=Workload(trains=False)).mask == "blocks"


def test_flex_under_strategy_sdpa_is_refused_also_on_cuda() -> None:
    with pytest.raises(StrategyError, match="sdpa"):
        choose("sdpa", "flex", "cuda")


def test_uncompiled_flex_with_gradients_is_refused_for_several_threads_unless_forced() -> None:
    assert choose("eager", "auto", "cuda").kernel == "flex"
    with pytest.raises(StrategyError, match=r"3 threads.*--force-unsafe"):
        choose("eager", "auto", "cuda", workload=Workload(3))
    assert choose("eager", "auto", "cuda", workload=Workload(3, force_unsafe=True)).kernel == "flex"
    assert choose("eager", "auto", "cuda", workload=Workload(3, trains=False)).kernel == "flex"


@pytest.mark.parametrize(
    ("strategy", "kernel", "near"),
    [("locked", "auto", "locked-compile"), ("eager", "flexx", "flex"), ("x", "sdpa", "one")],
)
def test_an_unknown_name_is_refused_and_the_nearest_offered(strategy: str, kernel: str, near: str) -> None:
    with pytest.raises(StrategyError, match=near):
        choose(strategy, kernel, "cpu")
