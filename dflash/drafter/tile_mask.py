"""Tiles of queries for the CPU kernel, from the spans of their queries; read on the host, so CPU tensors only."""

import torch
from torch import Tensor

from dflash.attention.tiles import Tile, TileMask
from dflash.drafter.mask import Spans

# queries a tile: measured on 512 queries in 6 heads of 32, 64 beats 32 and 128 for short and long documents alike
TILE_QUERIES = 64


def tile_mask(seen: Spans, block_size: int) -> TileMask:
    """Cuts each row's queries into tiles of whole blocks. Source of the layout: `spans`."""
    rows, Q = seen.own_start.shape
    step = block_size * max(1, TILE_QUERIES // block_size)
    tiles = [_tile(seen, row, first, min(first + step, Q)) for row in range(rows) for first in range(0, Q, step)]
    return TileMask(tuple(tiles), rows)


def _tile(seen: Spans, row: int, first: int, last: int) -> Tile:
    queries = (row, slice(first, last))
    context_start, context_end = seen.context_start[queries], seen.context_end[queries]
    own_start, own_end = seen.own_start[queries], seen.own_end[queries]
    some = context_start < context_end  # a padded block, or the first token of a document, has no context
    context = (int(context_start[some].min()), int(context_end[some].max())) if bool(some.any()) else (0, 0)
    own = (int(own_start.min()), int(own_end.max()))
    visible = torch.cat([_between(context, context_start, context_end), _between(own, own_start, own_end)], dim=1)
    return Tile(row, first, last, context, (seen.context + own[0], seen.context + own[1]), visible[None, None])


def _between(keys: tuple[int, int], start: Tensor, end: Tensor) -> Tensor:
    """Bool [queries, keys]: key in [start, end) of the query."""
    index = torch.arange(*keys)
    return (index >= start[:, None]) & (index < end[:, None])
