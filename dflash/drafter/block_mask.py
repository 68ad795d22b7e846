"""Flex's BlockMask computed from the spans: no dense grid, no trace, no process-global annotation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash.drafter.mask import Spans

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TILE = 128  # flex's default tile of queries and of keys


def block_mask(seen: Spans) -> BlockMask:
    """BlockMask [B, 1, Q, T + Q]: tiles visible in full, tiles visible in part, the function that decides in those."""
    Q = seen.own_start.shape[1]
    some, full = _tiles(seen, Q)
    partial = some & ~full
    kv = (*_ordered(partial), *_ordered(full))
    q = (*_ordered(partial.mT), *_ordered(full.mT))
    return BlockMask((Q, seen.context + Q), *kv, *q, BLOCK_SIZE=(TILE, TILE), mask_mod=_mask_mod(seen))


def _tiles(seen: Spans, Q: int) -> tuple[Tensor, Tensor]:
    """Tiles with some visible key, and tiles with every key visible to every query: bool [B, 1, Q tiles, KV tiles]."""
    keys = seen.context + Q
    start = torch.arange(0, keys, TILE, device=seen.own_start.device)
    end = start + TILE
    some = torch.zeros(*seen.own_start.shape, len(start), dtype=torch.bool, device=start.device)
    full = some.clone()
    own = (seen.own_start + seen.context, seen.own_end + seen.context)
    for first, last in ((seen.context_start, seen.context_end), own):
        low = torch.maximum(first[..., None], start)
        high = torch.minimum(last[..., None], end)
        some |= low < high
        full |= (first[..., None] <= start) & (last[..., None] >= end)
    return _over_queries(some).any(-2)[:, None], _over_queries(full).all(-2)[:, None]


def _over_queries(grid: Tensor) -> Tensor:
    """[B, Q, KV tiles] -> [B, Q tiles, 128, KV tiles]; queries beyond the last see nothing."""
    missing = -grid.shape[1] % TILE
    grid = torch.nn.functional.pad(grid, (0, 0, 0, missing))
    return grid.view(grid.shape[0], -1, TILE, grid.shape[2])


def _ordered(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles to visit in each row of tiles: how many [..., rows]; all columns, visited first [..., rows, columns]."""
    visited = grid.to(torch.int32)
    order = visited.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return visited.sum(-1, dtype=torch.int32), order.contiguous()


def _mask_mod(seen: Spans) -> MaskMod:
    context_start, context_end = seen.context_start, seen.context_end
    own_start, own_end = seen.own_start + seen.context, seen.own_end + seen.context

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_context = (kv >= context_start[b, q]) & (kv < context_end[b, q])
        return in_context | ((kv >= own_start[b, q]) & (kv < own_end[b, q]))

    return visible
