"""More of the same on other devices: targets for target threads, drafters for drafter threads and for evaluation."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.fsdp import FSDPModule

from dflash.config import TargetOptions
from dflash.drafter.model import DFlashDrafter
from dflash.parts import Parts, load_target
from dflash.pipeline.sharding import full
from dflash.target import Target


def targets(options: TargetOptions, first: Target, devices: Sequence[torch.device]) -> list[Target]:
    """One target a thread; threads on one device share it, as nothing in its forward is written to but by a thread."""
    loaded = {first.device: first}
    for device in devices:
        if device not in loaded:
            loaded[device] = load_target(options, device)
    return [loaded[device] for device in devices]


def drafters(parts: Parts, devices: Sequence[torch.device]) -> list[Parts]:
    """The parts of each drafter thread: the first is `parts` itself, the others hold copies with their weights."""
    others = []
    for device in devices[1:]:
        drafter = copied(parts.drafter, device)
        others.append(replace(parts, drafter=drafter, parameters=dict(drafter.named_parameters())))
    return [parts, *others]


def beside_target(parts: Parts) -> DFlashDrafter:
    """The drafter where decoding needs it: itself, or a copy as it is now when the target is on another device.

    A drafter that is split over the ranks is put together: for all ranks at once.
    """
    if parts.device == parts.target.device and not isinstance(parts.drafter, FSDPModule):
        return parts.drafter
    return copied(parts.drafter, parts.target.device)


def unsplit(parts: Parts) -> Parts:
    """The parts with the whole drafter, for what one rank does alone; for all ranks at once."""
    if not isinstance(parts.drafter, FSDPModule):
        return parts
    drafter = beside_target(parts)
    return replace(parts, drafter=drafter, parameters=dict(drafter.named_parameters()))


def copied(drafter: DFlashDrafter, device: torch.device) -> DFlashDrafter:
    """A drafter with the same weights, target matrices and attention on `device`; weights are copied, never shared."""
    twin = DFlashDrafter(
        drafter.config, drafter.target_layer_ids, drafter.block_size, drafter.max_anchors, drafter.mask_token_id
    ).to(device)
    twin.load_state_dict({name: full(tensor) for name, tensor in drafter.state_dict().items()})
    assert drafter.embed_tokens is not None
    # on the same device these are the same tensors: frozen, and often larger than the drafter
    head = None if drafter.lm_head is None else drafter.lm_head.to(device)
    twin.bind_target(drafter.embed_tokens.to(device), head)
    twin.checkpoint_layers = drafter.checkpoint_layers
    if drafter.backend is not None:
        twin.use_attention(drafter.backend)
    return twin
