"""Which strategy and kernel run, and why; a request that cannot be met is an error, never a quiet change."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch

from dflash.attention.base import AttentionBackend, MaskForm, Scope, Strategy
from dflash.attention.eager import Eager
from dflash.attention.force import ForceCompile
from dflash.attention.isolated import PROVED_ON, Isolated
from dflash.attention.locked import LockedCompile
from dflash.attention.sdpa import Sdpa
from dflash.errors import StrategyError

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "eager": Eager,
    "sdpa": Sdpa,
    "locked-compile": LockedCompile,
    "force-compile": ForceCompile,
    "isolated": Isolated,
}


@dataclass(frozen=True)
class Workload:
    """What the choice depends on besides the device.

    threads: how many call attention in this process; trains: whether gradients are needed; force_unsafe: run what is
    refused because threads disturb each other.
    """

    threads: int = 1
    trains: bool = True
    force_unsafe: bool = False


ONE_THREAD = Workload()


def choose(
    strategy: str,
    kernel: str,
    device: torch.device | str,
    *,
    scope: Scope = "attention",
    workload: Workload = ONE_THREAD,
) -> AttentionBackend:
    """Resolves `auto` by device, threads and version, and checks that the rest can run. Errors: StrategyError."""
    device = torch.device(device)
    _known(strategy, [*STRATEGIES, "auto"], "--attn-strategy")
    _known(kernel, ["flex", "sdpa", "auto"], "--attn-kernel")
    strategy_name, strategy_reason = _strategy(strategy, kernel, device, workload)
    kernel_name, kernel_reason = _kernel(kernel, strategy_name, device)
    _can_run(strategy_name, kernel_name, device, workload)
    reason = f"{strategy_reason}; {kernel_reason}"
    mask = mask_form(strategy_name, kernel_name, device)
    return AttentionBackend(STRATEGIES[strategy_name](), kernel_name, mask, reason, scope)


def _known(name: str, names: list[str], option: str) -> None:
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {near[0]}?" if near else "choose one of them"
    raise StrategyError("one of " + ", ".join(sorted(names)), repr(name), remedy, where=option)


def _strategy(name: str, kernel: str, device: torch.device, workload: Workload) -> tuple[str, str]:
    if name != "auto":
        return name, "strategy as asked"
    if kernel == "sdpa" or device.type != "cuda":
        return "sdpa", f"auto on {device.type}: the dense kernel needs no compiler, so no compile can race"
    if workload.threads == 1:
        return "locked-compile", "auto on cuda, one thread: compiled, cold steps alone, torch's tracing unchanged"
    if proved():
        return "isolated", f"auto on cuda, {workload.threads} threads: compiled, traces of other code shut out too"
    return "locked-compile", f"auto on cuda: isolated was not proved on torch {torch.__version__}; cold steps alone"


def proved() -> bool:
    """Whether `isolated` was proved on the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) in PROVED_ON


def _kernel(name: str, strategy: str, device: torch.device) -> tuple[Literal["flex", "sdpa"], str]:
    if name != "auto":
        return cast(Literal["flex", "sdpa"], name), "kernel as asked"
    if strategy == "sdpa":
        return "sdpa", "sdpa is this strategy's kernel"
    if device.type == "cuda":
        return "flex", "auto on cuda: block-sparse"
    return "sdpa", f"auto on {device.type}: flex has no backward here, so a dense mask"


def mask_form(strategy: str, kernel: str, device: torch.device) -> MaskForm:
    """Tiles have widths of their own in every step: only where nothing is compiled and reading spans costs no sync."""
    if kernel == "flex":
        return "blocks"
    return "tiles" if device.type == "cpu" and strategy in ("eager", "sdpa") else "dense"


def _can_run(strategy: str, kernel: str, device: torch.device, workload: Workload) -> None:
    if kernel == "flex" and strategy == "sdpa":
        raise StrategyError("the sdpa kernel under strategy sdpa", "flex", "use --attn-kernel auto or another strategy")
    if kernel == "flex" and workload.trains and device.type != "cuda":
        raise StrategyError(
            "a CUDA device for training with flex", str(device), "use --attn-kernel sdpa: flex has no CPU backward"
        )
    unsafe = kernel == "flex" and strategy == "eager" and workload.trains and workload.threads > 1
    if unsafe and not workload.force_unsafe:
        raise StrategyError(
            "one thread for uncompiled flex with gradients",
            f"{workload.threads} threads",
            "use isolated, locked-compile or sdpa: each call traces and disturbs the other threads (--force-unsafe)",
        )
