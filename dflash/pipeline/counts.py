"""What micro-batches add up to: over a step, over a drafter's share of it, over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from dflash.drafter.metrics import Metrics


@dataclass(frozen=True)
class Counted:
    """Sums; the gradients that belong to them are in the parameters. `metrics` is none when no anchor was valid."""

    metrics: Metrics | None = None
    # context tokens, padding not counted
    tokens: int = 0
    # micro-batches without a valid anchor
    empty: int = 0

    def __add__(self, other: "Counted") -> "Counted":
        """Merges; the order of the operands is the order of the floating-point sums."""
        metrics = self.metrics
        if other.metrics is not None:
            metrics = other.metrics if metrics is None else metrics + other.metrics
        return Counted(metrics, self.tokens + other.tokens, self.empty + other.empty)

    def to(self, device: torch.device) -> "Counted":
        """The same counts on `device`."""
        if self.metrics is None:
            return self
        moved = (getattr(self.metrics, field.name).to(device) for field in fields(Metrics))
        return Counted(Metrics(*moved), self.tokens, self.empty)


# sums counts and gradients of a step over all who share it: (counts, parameters with their gradients, K - 1) -> counts
Merge = Callable[[Counted, Sequence[nn.Parameter], int], Counted]


def alone(counted: Counted, parameters: Sequence[nn.Parameter], slots: int) -> Counted:
    """The merge of a process that shares its steps with none."""
    return counted
