"""Which keys a block's query sees: two spans a query, from which the dense mask and flex's BlockMask are computed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.drafter.anchors import Anchors


@dataclass(frozen=True)
class Layout:
    """How a layer sees context and its own block.

    window: tokens of context of a sliding layer, none: all; causal: inside the block, slot q sees slots 0..q only.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class Spans:
    """Visible keys of query q = block * K + slot, each [B, Q] int64: context [start, end) and own block [start, end).

    Keys 0..T-1 are the row's context, T.. are the N * K block tokens; `own_*` count from T. context: T, keys: T + Q.
    """

    context_start: Tensor
    context_end: Tensor
    own_start: Tensor
    own_end: Tensor
    context: int


def spans(anchors: Anchors, document_ids: Tensor, block_size: int, layout: Layout) -> Spans:
    """Computes the spans of every query; document_ids [B, T], each document contiguous. Source: arXiv 2602.06036."""
    B, N = anchors.position.shape
    T = document_ids.shape[1]
    slot = torch.arange(block_size, device=document_ids.device)
    anchor = anchors.position[:, :, None]
    start = document_starts(document_ids).gather(1, anchors.position)[:, :, None].expand(B, N, block_size)
    if layout.window is not None:
        start = torch.maximum(start, anchor + slot - layout.window + 1)
    end = anchor.expand(B, N, block_size)  # strict: at inference the anchor's own feature does not exist yet
    end = end * anchors.valid[:, :, None]  # a padded block sees only itself
    own = torch.arange(N, device=document_ids.device)[None, :, None] * block_size
    own_end = own + (slot + 1 if layout.causal else block_size)
    shape = (B, N * block_size)
    return Spans(
        start.minimum(end).reshape(shape),
        end.reshape(shape),
        own.expand(B, N, block_size).reshape(shape),
        own_end.expand(B, N, block_size).reshape(shape),
        T,
    )


def document_starts(document_ids: Tensor) -> Tensor:
    """Index of the first token of each position's document [B, T]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return (index * begins).cummax(dim=1).values


def dense_mask(seen: Spans) -> Tensor:
    """Bool mask for SDPA [B, 1, Q, T + Q], true where visible."""
    Q = seen.own_start.shape[1]
    context = torch.arange(seen.context, device=seen.own_start.device)
    own = torch.arange(Q, device=seen.own_start.device)
    in_context = (context >= seen.context_start[..., None]) & (context < seen.context_end[..., None])
    in_own = (own >= seen.own_start[..., None]) & (own < seen.own_end[..., None])
    return torch.cat([in_context, in_own], dim=-1)[:, None]
