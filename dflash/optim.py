"""AdamW on float32 masters, a cosine schedule that is a function of the step, and clipping of a mean gradient."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dflash.config import OptimOptions
from dflash.pipeline.sharding import full, like

FLOOR = 0.0  # share of the peak learning rate at the last step (arXiv 2602.06036 anneals to zero)


def build_optimizer(parameters: Mapping[str, nn.Parameter], options: OptimOptions) -> torch.optim.AdamW:
    """AdamW over named float32 parameters; matrices decay, norm gains do not."""
    assert all(parameter.dtype == torch.float32 for parameter in parameters.values()), "masters are float32"
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    gains = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    # fused: one pass over memory a step; on a CPU it is also the fastest and is deterministic
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, fused=True)


def learning_rate(step: int, total_steps: int, options: OptimOptions) -> float:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then half a cosine down to zero."""
    warmup_steps = round(options.warmup * total_steps)
    if step < warmup_steps:
        return options.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return options.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets it for every group; no scheduler object, so there is no state to resume or to step too often."""
    for group in optimizer.param_groups:
        group["lr"] = value


def finish_gradients(parameters: Iterable[nn.Parameter], weight_sum: float, clip: float) -> float:
    """Turns gradients of sum(w * l) into those of sum(w * l) / sum(w), clips them, returns the norm before clipping."""
    present = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in present:
        assert parameter.grad is not None
        parameter.grad.div_(weight_sum)
    return float(full(nn.utils.clip_grad_norm_(present, clip)))


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `<parameter>/<state>`."""
    return {
        f"{name}/{key}": full(value.detach())
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts named tensors back, on each parameter's device; the step counter stays float32."""
    for name, parameter in parameters.items():
        found = {key: tensors.get(f"{name}/{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
        state = {key: _placed(value, parameter) for key, value in found.items() if value is not None}
        if state:
            optimizer.state[parameter] = state


def _placed(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A moment goes where its parameter is, split as it is; the step counter is a number."""
    return like(value.to(parameter.device), parameter) if value.ndim else value.to(parameter.device)
