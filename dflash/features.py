"""Features: what the drafter sees of the target, and the store that keeps them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Features:
    """Target activations of one document [T, ...] or of a batch of rows [B, T, ...].

    hidden  [..., T, L, H]  outputs of the chosen target layers, in the order of the layer ids, before any final norm
    last    [..., T, H]     what the target's head reads: the last layer's output, final norm applied exactly once
    """

    hidden: Tensor
    last: Tensor
