"""Small drafters and rows for tests: random weights with norms away from one, documents of chosen lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash.drafter.anchors import Anchors, draw_anchors
from dflash.drafter.blocks import PlainRows
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.features import Features

WIDTH, VOCABULARY, MASK = 32, 61, 60
LAYER_IDS = (1, 3)


def target_config(theta: float = 50000.0, partial: float | None = None) -> Qwen3Config:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if partial is not None:
        rope["partial_rotary_factor"] = partial
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_parameters=rope,
    )


def make_drafter(
    block_size: int = 4,
    max_anchors: int = 12,
    layers: int = 2,
    window: int | None = None,
    causal: bool = True,
) -> DFlashDrafter:
    config = create_drafter_config(target_config(), layers, window, causal)
    config.initializer_range = 0.2
    drafter = DFlashDrafter(config, LAYER_IDS, block_size, max_anchors, MASK)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if name.endswith("norm.weight"):  # a norm of exactly one would hide a norm that is missing or applied twice
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    drafter.bind_target(
        torch.randn(VOCABULARY, WIDTH, generator=generator), torch.randn(VOCABULARY, WIDTH, generator=generator)
    )
    return drafter


def make_rows(lengths: Sequence[Sequence[int]], tokens: int, supervised: float = 1.0, seed: int = 0) -> PlainRows:
    """Rows of documents of these lengths, then padding; a share of the tokens is supervised."""
    generator = torch.Generator().manual_seed(seed)
    B = len(lengths)
    document_ids = torch.full((B, tokens), -1)
    position_ids = torch.zeros(B, tokens, dtype=torch.int64)
    for row, row_lengths in enumerate(lengths):
        at = 0
        for index, length in enumerate(row_lengths):
            document_ids[row, at : at + length] = index
            position_ids[row, at : at + length] = torch.arange(length)
            at += length
    input_ids = torch.randint(0, MASK, (B, tokens), generator=generator)
    loss_mask = (torch.rand(B, tokens, generator=generator) < supervised) & (document_ids >= 0)
    return PlainRows(input_ids, loss_mask, position_ids, document_ids)


def make_features(rows: PlainRows, seed: int = 1) -> Features:
    generator = torch.Generator().manual_seed(seed)
    B, T = rows.input_ids.shape
    hidden = torch.randn(B, T, len(LAYER_IDS), WIDTH, generator=generator)
    return Features(hidden, torch.randn(B, T, WIDTH, generator=generator))


def draw(rows: PlainRows, drafter: DFlashDrafter, seed: int = 0, epoch: int = 0) -> Anchors:
    documents = [sorted({int(i) for i in row.tolist() if i >= 0}) for row in rows.document_ids]
    return draw_anchors(
        rows.loss_mask,
        rows.document_ids,
        documents,
        block_size=drafter.block_size,
        max_anchors=drafter.max_anchors,
        seed=seed,
        epoch=epoch,
    )


def naive_mask(anchors: Anchors, document_ids: Tensor, block_size: int, window: int | None, causal: bool) -> Tensor:
    """The rule of arXiv 2602.06036 one element at a time: [B, 1, Q, T + Q]."""
    B, N = anchors.position.shape
    T, Q = document_ids.shape[1], N * block_size
    seen = torch.zeros(B, 1, Q, T + Q, dtype=torch.bool)
    for b in range(B):
        for q in range(Q):
            block, slot = divmod(q, block_size)
            a = int(anchors.position[b, block])
            for kv in range(T + Q):
                if kv < T:
                    visible = bool(anchors.valid[b, block]) and kv < a
                    visible = visible and bool(document_ids[b, kv] == document_ids[b, a])
                    visible = visible and (window is None or kv > a + slot - window)
                else:
                    other, other_slot = divmod(kv - T, block_size)
                    visible = other == block and (window is None or not causal or other_slot <= slot)
                seen[b, 0, q, kv] = visible
    return seen
