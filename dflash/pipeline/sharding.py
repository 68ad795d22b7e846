"""A drafter that does not fit one device: weights, gradients and optimizer state split over the ranks (FSDP2)."""

from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash.config import TrainConfig
from dflash.drafter.model import DFlashDrafter
from dflash.errors import ConfigError


def shard(drafter: DFlashDrafter) -> None:
    """Splits every layer, and what is left, over all ranks; gradients are summed, not averaged: the caller divides.

    In place, before the optimizer is built; needs the process group.
    """
    for module in (*drafter.layers, drafter):
        split = fully_shard(module)
        split.set_gradient_divide_factor(1.0)
        # gloo knows no scaled sums
        split.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(drafter, "terms")


def check_shard(config: TrainConfig, drafters: int, ranks: int) -> None:
    """ConfigError for what splitting does not go with; a process that has one micro-batch less would hang the rest."""
    for expected, got, ok in (
        ("several processes", "one: start it with torchrun", ranks > 1),
        ("one drafter a process", f"{drafters} in --drafters", drafters == 1),
        ("--compile-scope attention", config.compile_scope, config.compile_scope == "attention"),
        (f"a multiple of {ranks} in --optim.accumulate", str(config.optim.accumulate),
         config.optim.accumulate % ranks == 0),
    ):  # fmt: skip
        if not ok:
            raise ConfigError(expected, got, "change it, or leave out --shard", where="--shard")


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split; for all ranks at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, split: Tensor) -> Tensor:
    """A whole tensor, the same on all ranks, split as `split` is."""
    if not isinstance(split, DTensor):
        return tensor
    # every rank has read the same file: nothing needs to be sent
    return distribute_tensor(tensor.to(split.device), split.device_mesh, split.placements, src_data_rank=None)
