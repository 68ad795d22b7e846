"""The CPU's kernel for uncompiled SDPA: queries in tiles of whole blocks, each over the few keys it can see."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Tile:
    """Some consecutive queries of a row, which see keys inside `context` [first, last) and their own blocks' only.

    visible [1, 1, queries, keys] bool: context's keys, then the own blocks', one a query.
    """

    context: tuple[int, int]
    visible: Tensor


@dataclass(frozen=True)
class TileMask:
    """Tiles of each row in the order of its queries; every tile but the last has `queries` of them.

    context: T, the number of context keys, which come before the Q keys of the blocks.
    """

    rows: tuple[tuple[Tile, ...], ...]
    queries: int
    context: int


def tiled_kernel(query: Tensor, key: Tensor, value: Tensor, mask: TileMask, scale: float) -> Tensor:
    """The values of sdpa_kernel under the dense mask; 2 to 4 times faster on CPU, where most keys are hidden.

    query [B, heads, Q, D], key and value [B, kv_heads, T + Q, D] -> [B, heads, Q, D].
    """
    # split, not slices: its backward is one concatenation, a slice's fills a tensor of zeros as large as the whole
    rows = zip(torch.split(query, 1), torch.split(key, 1), torch.split(value, 1), mask.rows, strict=True)
    return torch.cat([_row(q, k, v, tiles, mask, scale) for q, k, v, tiles in rows])


def _row(query: Tensor, key: Tensor, value: Tensor, tiles: tuple[Tile, ...], mask: TileMask, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    context_key, own_key = torch.split(key, [mask.context, query.shape[2]], dim=2)
    context_value, own_value = torch.split(value, [mask.context, query.shape[2]], dim=2)
    parts = (torch.split(x, mask.queries, dim=2) for x in (query, own_key, own_value))
    outs = []
    for tile, q, k, v in zip(tiles, *parts, strict=True):
        first, last = tile.context
        if last > first:
            k = torch.cat([context_key[:, :, first:last], k], dim=2)
            v = torch.cat([context_value[:, :, first:last], v], dim=2)
        outs.append(scaled_dot_product_attention(q, k, v, attn_mask=tile.visible, scale=scale, enable_gqa=grouped))
    return torch.cat(outs, dim=2)
