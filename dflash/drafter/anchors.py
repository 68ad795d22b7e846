"""Anchors: the positions where training blocks start, the same whatever the packing, the workers or a resume."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """N block starts a row, sorted; the number is fixed, the ones at the end that are not valid are padding.

    position [B, N] int64  index in the row (0 where padded)      valid [B, N] bool
    """

    position: Tensor
    valid: Tensor

    def to(self, device: torch.device | str) -> "Anchors":
        """The same anchors on `device`."""
        return Anchors(self.position.to(device), self.valid.to(device))


def candidates(loss_mask: Tensor, document_ids: Tensor, block_size: int) -> Tensor:
    """Where a block may start [B, T] bool: its token and the next supervised, the whole block inside one document.

    loss_mask [B, T] bool, document_ids [B, T] int (-1: padding, each document contiguous).
    """
    B, T = loss_mask.shape
    found = torch.zeros(B, T, dtype=torch.bool, device=loss_mask.device)
    last_start = T - block_size + 1
    if last_start <= 0:
        return found
    first, last = document_ids[:, :last_start], document_ids[:, block_size - 1 :]
    supervised = loss_mask[:, :last_start] & loss_mask[:, 1 : last_start + 1]
    found[:, :last_start] = supervised & (first == last) & (first >= 0)
    return found


def draw_anchors(
    loss_mask: Tensor,
    document_ids: Tensor,
    doc_ids: Sequence[Sequence[int]],
    *,
    block_size: int,
    max_anchors: int,
    seed: int,
    epoch: int,
) -> Anchors:
    """Draws up to `max_anchors` anchors a row, without replacement, on the CPU.

    loss_mask [B, T] bool, document_ids [B, T] int, doc_ids: store ids of each row's documents. Every document draws one
    key a candidate from its own generator (seed, epoch, store id); a row keeps its smallest keys. No global RNG.
    """
    loss_mask, document_ids = loss_mask.cpu(), document_ids.cpu()
    allowed = candidates(loss_mask, document_ids, block_size)
    position = torch.zeros(len(doc_ids), max_anchors, dtype=torch.int64)
    valid = torch.zeros(len(doc_ids), max_anchors, dtype=torch.bool)
    for row, store_ids in enumerate(doc_ids):
        found = allowed[row].nonzero().flatten()
        owner = document_ids[row, found]
        keys = torch.empty(len(found), dtype=torch.float64)
        for index, store_id in enumerate(store_ids):
            own = owner == index
            generator = torch.Generator().manual_seed(_document_seed(seed, epoch, store_id))
            keys[own] = torch.rand(int(own.sum()), dtype=torch.float64, generator=generator)
        chosen = found[keys.argsort(stable=True)[:max_anchors]].sort().values
        position[row, : len(chosen)] = chosen
        valid[row, : len(chosen)] = True
    return Anchors(position, valid)


def _document_seed(seed: int, epoch: int, store_id: int) -> int:
    """63 bits that depend on all three: neighbouring seeds give unrelated streams."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{store_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
