"""Metrics of drafted blocks against the data: sums, so that micro-batches, ranks and steps merge by adding."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """Counts over blocks; slots are 1..K-1.

    correct, valid      [K-1] float64  slots whose argmax is the data's token; slots that are supervised
    accepted, reached   [K-1] float64  the same, only where every earlier slot of the block was correct
    matched, blocks     [] float64     length of the matching prefix, summed; blocks with at least slot 1 supervised
    loss_sum, weight_sum [] float64    sum(w * l) and sum(w) of the objective
    """

    correct: Tensor
    valid: Tensor
    accepted: Tensor
    reached: Tensor
    matched: Tensor
    blocks: Tensor
    loss_sum: Tensor
    weight_sum: Tensor

    def __add__(self, other: "Metrics") -> "Metrics":
        """Merges the counts of two micro-batches, steps or ranks."""
        return Metrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def loss(self) -> Tensor:
        """Mean weighted loss, sum(w * l) / sum(w); 0 when nothing was supervised."""
        return _ratio(self.loss_sum, self.weight_sum)

    @property
    def accuracy(self) -> Tensor:
        """Share of correct tokens over all supervised slots. It is not acceptance."""
        return _ratio(self.correct.sum(), self.valid.sum())

    @property
    def slot_accuracy(self) -> Tensor:
        """Share of correct tokens of each slot [K-1]."""
        return _ratio(self.correct, self.valid)

    @property
    def conditional_acceptance(self) -> Tensor:
        """Share of correct tokens of each slot among blocks whose earlier slots were all correct [K-1]."""
        return _ratio(self.accepted, self.reached)

    @property
    def tau(self) -> Tensor:
        """Acceptance length: mean length of the matching prefix plus 1 for the target's own (bonus) token."""
        return _ratio(self.matched, self.blocks) + 1.0


def count(predicted: Tensor, labels: Tensor, valid: Tensor, loss_sum: Tensor, weight_sum: Tensor) -> Metrics:
    """Counts one micro-batch: predicted, labels, valid [B, N, K-1]; everything detached, on the device, no sync."""
    right = (predicted == labels) & valid
    prefix = right.to(torch.int64).cumprod(-1).bool()
    before = torch.ones_like(prefix)
    before[..., 1:] = prefix[..., :-1]
    over_blocks = (0, 1)
    return Metrics(
        correct=right.sum(over_blocks).double(),
        valid=valid.sum(over_blocks).double(),
        accepted=prefix.sum(over_blocks).double(),
        reached=(before & valid).sum(over_blocks).double(),
        matched=prefix.sum().double(),
        blocks=valid[..., 0].sum().double(),
        loss_sum=loss_sum.detach().double(),
        weight_sum=weight_sum.detach().double(),
    )


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Quotient, 0 where nothing was counted."""
    return above / below.clamp_min(torch.finfo(below.dtype).tiny)
