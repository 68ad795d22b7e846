"""The seam between what is computed (kernels) and how it is made safe to compile in threads (strategies)."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

Role = Literal["attention", "layer", "mask", "loss"]
Scope = Literal["attention", "layer"]
MaskForm = Literal["blocks", "dense", "tiles"]
Fn = TypeVar("Fn", bound=Callable[..., Any])


class Strategy(Protocol):
    """How compiled functions are built and called when several threads do so in one process."""

    name: str
    # races that it does not prevent, in words; "" when none reaches it
    leaves_open: str

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns `fn` as this strategy runs it. Called once, while the drafter is built, never in a step."""
        ...

    def thread_scope(self) -> AbstractContextManager[None]:
        """Entered once by every thread that will call compiled functions."""
        ...

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Round forward AND backward of one step; `key`: all that dynamo guards on (shapes, dtypes, device, grad)."""
        ...


@dataclass(frozen=True)
class AttentionBackend:
    """What a drafter's attention runs on, and why.

    kernel: flex or sdpa; mask: a BlockMask for flex, for sdpa dense or (CPU, uncompiled) in tiles; reason: one line for
    the run's header; scope: what a compiling strategy compiles.
    """

    strategy: Strategy
    kernel: Literal["flex", "sdpa"]
    mask: MaskForm
    reason: str
    scope: Scope = "attention"

    def __str__(self) -> str:
        return f"strategy {self.strategy.name}, kernel {self.kernel} (mask: {self.mask}): {self.reason}"


def step_key(*tensors: Tensor, extra: Hashable = None) -> Hashable:
    """The key of a step: shape, dtype and device of its inputs, grad mode, autocast; `extra`: what else varies."""
    described = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)
    device_types = sorted({t.device.type for t in tensors})
    autocast = tuple((d, torch.get_autocast_dtype(d)) for d in device_types if torch.is_autocast_enabled(d))
    return described, torch.is_grad_enabled(), autocast, extra
