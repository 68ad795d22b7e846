"""Which strategy and kernel run, and why; a request that cannot be met is an error, never a quiet change."""

import difflib
from collections.abc import Callable
from typing import Literal, cast

import torch

from dflash.attention.base import AttentionBackend, MaskForm, Scope, Strategy
from dflash.attention.eager import Eager
from dflash.attention.force import ForceCompile
from dflash.attention.locked import LockedCompile
from dflash.attention.sdpa import Sdpa
from dflash.errors import StrategyError

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "eager": Eager,
    "sdpa": Sdpa,
    "locked-compile": LockedCompile,
    "force-compile": ForceCompile,
}


def choose(
    strategy: str,
    kernel: str,
    device: torch.device | str,
    *,
    scope: Scope = "attention",
    threads: int = 1,
    trains: bool = True,
) -> AttentionBackend:
    """Resolves `auto` by device and checks that the rest can run.

    threads: how many call attention in this process; trains: whether gradients are needed. Errors: StrategyError.
    """
    device = torch.device(device)
    _known(strategy, [*STRATEGIES, "auto"], "--attn-strategy")
    _known(kernel, ["flex", "sdpa", "auto"], "--attn-kernel")
    strategy_name, strategy_reason = _strategy(strategy, kernel, device)
    kernel_name, kernel_reason = _kernel(kernel, strategy_name, device)
    _can_run(strategy_name, kernel_name, device, threads, trains)
    reason = f"{strategy_reason}; {kernel_reason}"
    mask = _mask_form(strategy_name, kernel_name, device)
    return AttentionBackend(STRATEGIES[strategy_name](), kernel_name, mask, reason, scope)


def _known(name: str, names: list[str], option: str) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]}?" if near else "choose one of them"
    raise StrategyError("one of " + ", ".join(sorted(names)), repr(name), remedy, where=option)


def _strategy(name: str, kernel: str, device: torch.device) -> tuple[str, str]:
    if name != "auto":
        return name, "strategy as asked"
    if kernel == "sdpa" or device.type != "cuda":
        return "sdpa", f"auto on {device.type}: the dense kernel needs no compiler, so no compile can race"
    return "locked-compile", "auto on cuda: compiled, cold steps alone in the process"


def _kernel(name: str, strategy: str, device: torch.device) -> tuple[Literal["flex", "sdpa"], str]:
    if name != "auto":
        return cast(Literal["flex", "sdpa"], name), "kernel as asked"
    if strategy == "sdpa":
        return "sdpa", "sdpa is this strategy's kernel"
    if device.type == "cuda":
        return "flex", "auto on cuda: block-sparse"
    return "sdpa", f"auto on {device.type}: flex has no backward here, so a dense mask"


def _mask_form(strategy: str, kernel: str, device: torch.device) -> MaskForm:
    """Tiles have widths of their own in every step: only where nothing is compiled and reading spans costs no sync."""
    if kernel == "flex":
        return "blocks"
    return "tiles" if device.type == "cpu" and strategy in ("eager", "sdpa") else "dense"


def _can_run(strategy: str, kernel: str, device: torch.device, threads: int, trains: bool) -> None:
    if kernel == "flex" and strategy == "sdpa":
        raise StrategyError("the sdpa kernel under strategy sdpa", "flex", "use --attn-kernel auto or another strategy")
    if kernel == "flex" and trains and device.type != "cuda":
        raise StrategyError(
            "a CUDA device for training with flex", str(device), "use --attn-kernel sdpa: flex has no CPU backward"
        )
    if kernel == "flex" and strategy == "eager" and trains and threads > 1:
        raise StrategyError(
            "one thread for uncompiled flex with gradients",
            f"{threads} threads",
            "use locked-compile or sdpa: each call traces and disturbs the other threads",
        )
