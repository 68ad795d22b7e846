"""Blocks of a row: their tokens, positions, labels and which slots count, from anchors; index arithmetic only."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash.drafter.anchors import Anchors
from dflash.errors import DataError


class Rows(Protocol):
    """Packed rows as `dflash.data.rows.Batch` has them; every tensor [B, T]."""

    @property
    def input_ids(self) -> Tensor:
        """int64 tokens."""
        ...

    @property
    def loss_mask(self) -> Tensor:
        """bool, supervised tokens."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """int64, counted in each document."""
        ...

    @property
    def document_ids(self) -> Tensor:
        """int64, 0.. in the row, -1 padding."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Rows without the bookkeeping of a batch."""

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor


@dataclass(frozen=True)
class Blocks:
    """ids, position_ids [B, N, K] int64; labels [B, N, K-1] int64 and valid [B, N, K-1] bool for slots 1..K-1."""

    ids: Tensor
    position_ids: Tensor
    labels: Tensor
    valid: Tensor


def cut_blocks(rows: Rows, anchors: Anchors, block_size: int, mask_token_id: int) -> Blocks:
    """Lays one block at each anchor: slot 0 the anchor's token, the others the mask token, positions anchor + k."""
    T = rows.input_ids.shape[1]
    slot = torch.arange(block_size, device=rows.input_ids.device)
    index = anchors.position[..., None] + slot
    inside = index < T
    index = index.clamp_max(T - 1)
    flat = index.flatten(1)
    tokens = rows.input_ids.gather(1, flat).view_as(index)
    ids = torch.full_like(tokens, mask_token_id)
    ids[..., 0] = tokens[..., 0]
    document = rows.document_ids.gather(1, flat).view_as(index)
    supervised = rows.loss_mask.gather(1, flat).view_as(index)
    valid = supervised & inside & (document == document[..., :1]) & (document >= 0) & anchors.valid[..., None]
    start = rows.position_ids.gather(1, anchors.position)
    return Blocks(ids, start[..., None] + slot, tokens[..., 1:], valid[..., 1:])


def document_ids_from_lengths(lengths: Tensor | None, input_ids: Tensor) -> Tensor:
    """Document of each token [B, T] from the lengths of a row's documents, [n] (one row) or [B, n]; -1 after the last.

    None: one document a row. Errors: DataError.
    """
    B, T = input_ids.shape
    if lengths is None:
        return torch.zeros_like(input_ids)
    lengths = torch.as_tensor(lengths, device=input_ids.device)
    lengths = lengths[None] if lengths.dim() == 1 and B == 1 else lengths[:, None] if lengths.dim() == 1 else lengths
    if lengths.shape[0] != B or bool((lengths < 0).any()) or int(lengths.sum(1).max()) > T:
        raise DataError(f"lengths of {B} rows that fit in {T} tokens", str(lengths.tolist()), "check the packing")
    ends = lengths.cumsum(1)
    position = torch.arange(T, device=input_ids.device).expand(B, T).contiguous()
    document = torch.searchsorted(ends.contiguous(), position, right=True)
    return torch.where(position < ends[:, -1:], document, -1)
