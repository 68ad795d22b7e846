"""Objectives: what the drafter is trained to do, behind one interface that never normalises."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.errors import ConfigError


@dataclass(frozen=True)
class Targets:
    """What slots 1..K-1 of every block are compared with.

    labels [B, N, K-1] int64  the data's tokens      valid [B, N, K-1] bool  supervised, in the document, not padding
    decay  [K-1] float32      exp(-(k-1) / gamma)    teacher [B, N, K-1, V]  the target's logits, when asked for
    """

    labels: Tensor
    valid: Tensor
    decay: Tensor
    teacher: Tensor | None = None


class Objective(Protocol):
    """sum(w * l) and sum(w) over one micro-batch: the caller divides by sum(w) over the whole global batch."""

    name: str
    needs_teacher: bool

    def __call__(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """logits [B, N, K-1, V] -> (sum of w * l, with grad; sum of w), float32 scalars."""
        ...


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) [B, N, K-1] in float32, without a second copy of the logits when they are float32."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return flat.view(labels.shape)


class CrossEntropy:
    """Against the data's token, weights decaying along the block (arXiv 2602.06036)."""

    name = "ce"
    needs_teacher = False

    def __call__(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """See Objective."""
        weights = targets.valid * targets.decay
        return (weights * token_nll(logits, targets.labels)).sum(), weights.sum()


class KLDivergence:
    """KL(target || drafter) against the target's soft distribution, same weights as ce (the case's use_soft_labels)."""

    name = "kl"
    needs_teacher = True

    def __call__(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """See Objective."""
        assert targets.teacher is not None, "kl needs teacher logits"
        weights = targets.valid * targets.decay
        log_q = F.log_softmax(logits.float(), dim=-1)
        log_p = F.log_softmax(targets.teacher.float(), dim=-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        return (weights * divergence).sum(), weights.sum()


class DPace:
    """Cross entropy weighted by each slot's share in the expected accepted length (arXiv 2605.18810, eqs. 7 to 9).

    Confidence q = p(label), smoothed to (1 - alpha) q + alpha; the weight of slot j is the sum over m >= j of the
    product of the smoothed confidences of slots 1..m; detached. A slot that is not valid ends its block's prefix.
    """

    name = "dpace"
    needs_teacher = False

    def __init__(self, alpha: float = 0.5) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ConfigError("a D-PACE alpha in (0, 1]", str(alpha), "the paper uses 0.5")
        self.alpha = alpha

    def __call__(self, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """See Objective."""
        nll = token_nll(logits, targets.labels)
        weights = self.weights(nll.detach(), targets.valid)
        return (weights * nll).sum(), weights.sum()

    def weights(self, nll: Tensor, valid: Tensor) -> Tensor:
        """nll, valid [..., K-1] -> weights [..., K-1], zero where not valid."""
        smoothed = (1.0 - self.alpha) * torch.exp(-nll) + self.alpha
        prefix = torch.cumprod(smoothed * valid, dim=-1)
        return prefix.flip(-1).cumsum(-1).flip(-1) * valid


OBJECTIVES: dict[str, type[CrossEntropy] | type[KLDivergence] | type[DPace]] = {
    "ce": CrossEntropy,
    "kl": KLDivergence,
    "dpace": DPace,
}


def default_gamma(block_size: int) -> float:
    """4, 5, 7 slots for blocks of 8, 10, 16 (the paper's), straight lines between and beyond."""
    if block_size <= 10:
        return block_size / 2
    return 5.0 + (block_size - 10) / 3


def slot_decay(block_size: int, gamma: float | None, device: torch.device) -> Tensor:
    """exp(-(k-1) / gamma) for slots k = 1..K-1 [K-1]; gamma in slots, none: `default_gamma`. Errors: ConfigError."""
    gamma = default_gamma(block_size) if gamma is None else gamma
    if not gamma > 0 or math.isnan(gamma):
        raise ConfigError("a gamma above 0", str(gamma), "leave it out for the paper's value")
    slot = torch.arange(block_size - 1, dtype=torch.float32, device=device)
    return torch.exp(-slot / gamma)
