"""Tiles of queries for the CPU kernel, from the spans of their queries; read on the host, so CPU tensors only."""

import torch
from torch import Tensor

from dflash.attention.tiles import Tile, TileMask
from dflash.drafter.mask import Spans

# queries a tile: measured on 512 queries in 6 heads of 32, 64 beats 32 and 128 for short and long documents alike
TILE_QUERIES = 64


def tile_mask(seen: Spans, block_size: int) -> TileMask:
    """Cuts each row's queries into tiles of whole blocks, so that a tile's own keys are those of its own queries."""
    rows, Q = seen.own_start.shape
    step = block_size * max(1, TILE_QUERIES // block_size)
    tiles = [tuple(_tile(seen, row, first, min(first + step, Q)) for first in range(0, Q, step)) for row in range(rows)]
    return TileMask(tuple(tiles), step, seen.context)


def _tile(seen: Spans, row: int, first: int, last: int) -> Tile:
    queries = (row, slice(first, last))
    start, end = seen.context_start[queries], seen.context_end[queries]
    some = start < end  # a padded block, or the first token of a document, has no context
    context = (int(start[some].min()), int(end[some].max())) if bool(some.any()) else (0, 0)
    own = _between((first, last), seen.own_start[queries], seen.own_end[queries])
    visible = torch.cat([_between(context, start, end), own], dim=1)
    return Tile(context, visible[None, None])


def _between(keys: tuple[int, int], start: Tensor, end: Tensor) -> Tensor:
    """Bool [queries, keys]: key in [start, end) of the query."""
    index = torch.arange(*keys)
    return (index >= start[:, None]) & (index < end[:, None])
