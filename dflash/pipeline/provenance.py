"""Where a number that is not finite comes from: the gradient's tensor, the sample, the slot, the target's layer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash.data.rows import Batch
from dflash.drafter.anchors import Anchors
from dflash.drafter.blocks import PlainRows, cut_blocks
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import token_nll
from dflash.features import Features
from dflash.step import Stepper, identity

# findings named in an error: the first ones tell, the rest follow from them
SHOWN = 3


def provenance(stepper: Stepper, micro_batches: Sequence[Batch]) -> str:
    """Computes a step that was not finite once more; one line, the likely cause first. Leaves gradients behind."""
    found = [*_weights(stepper), *(text for batch in micro_batches for text in _batch(stepper, batch))]
    found += _gradients(stepper, micro_batches)
    if not found:
        return "looked at again, everything was finite: the cause is not in the data or the weights"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _weights(stepper: Stepper) -> Iterator[str]:
    for name, parameter in stepper.parts.parameters.items():
        if not _finite(parameter):
            yield f"weight {name}"


def _gradients(stepper: Stepper, micro_batches: Sequence[Batch]) -> list[str]:
    """Computed again: clipping by a norm that is not finite has spoilt those that there were."""
    stepper.parts.optimizer.zero_grad(set_to_none=True)
    for batch in micro_batches:
        stepper.count(batch)
    parameters = stepper.parts.parameters.items()
    return [f"gradient of {name}" for name, p in parameters if p.grad is not None and not _finite(p.grad)]


@torch.no_grad()
def _batch(stepper: Stepper, batch: Batch) -> Iterator[str]:
    anchors = stepper.anchors(batch)
    if not anchors.valid.any():
        return
    device = stepper.parts.device
    features = stepper.source.rows(batch, device)
    for name, tensor in (("target layer output", features.hidden), ("target last hidden state", features.last)):
        if not _finite(tensor):
            row, position = _first(~torch.isfinite(tensor).flatten(2).all(-1))
            layer = "" if tensor.dim() == 3 else f" {_layer(tensor[row, position], stepper)}"
            yield f"{name}{layer} at {_sample(batch, row, position)}"
    bad = _bad_slots(stepper, batch, features, anchors.to(device))
    if bad.any():
        row, block, slot = _first(bad)
        where = _sample(batch, row, int(anchors.position[row, block]))
        yield f"loss of slot {slot + 1} of the block at {where}"


def _bad_slots(stepper: Stepper, batch: Batch, features: Features, anchors: Anchors) -> Tensor:
    """Slots that count and whose loss is not finite [B, N, K-1]."""
    drafter: DFlashDrafter = stepper.parts.drafter
    device = stepper.parts.device
    rows = PlainRows(
        batch.input_ids.to(device),
        batch.loss_mask.to(device),
        batch.position_ids.to(device),
        batch.document_ids.to(device),
    )
    blocks = cut_blocks(rows, anchors, drafter.block_size, drafter.mask_token_id)
    with stepper.parts.arithmetic():
        logits = drafter.logits(drafter.block_hidden(rows, features.hidden, anchors, blocks))
    return (~torch.isfinite(token_nll(logits, blocks.labels)) & blocks.valid).cpu()


def _layer(layers: Tensor, stepper: Stepper) -> int:
    """The first target layer whose output [L, H] is not finite."""
    index = int((~torch.isfinite(layers).all(-1)).nonzero()[0])
    return stepper.parts.drafter.target_layer_ids[index]


def _sample(batch: Batch, row: int, position: int) -> str:
    """`document 12, token 7 (batch 0/4)`: store id, position in the document."""
    number = int(batch.document_ids[row, position])
    token = int(batch.position_ids[row, position])
    return f"token {token} of document {batch.doc_ids[row][number]} ({identity(batch)})"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
