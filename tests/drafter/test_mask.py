"""The mask: dense == tiles == flex's BlockMask == one element at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from dflash.attention.kernels import flex_kernel, sdpa_kernel
from dflash.attention.tiles import TileMask, tiled_kernel
from dflash.drafter.anchors import Anchors
from dflash.drafter.block_mask import TILE, block_mask
from dflash.drafter.mask import Layout, Spans, dense_mask, spans
from dflash.drafter.tile_mask import tile_mask
from tests.drafter.parts import naive_mask

TOKENS, BLOCKS = 24, 5


@st.composite
def masks(
    draw: st.DrawFn, rows: int | None = None, block_size: int | None = None
) -> tuple[Anchors, Tensor, int, Layout]:
    """Any documents, any sorted anchors inside them (overlapping blocks too), padded blocks, any window."""
    block_size = block_size or draw(st.integers(2, 5))
    rows = rows or draw(st.integers(1, 2))
    document_ids = torch.full((rows, TOKENS), -1)
    position = torch.zeros(rows, BLOCKS, dtype=torch.int64)
    valid = torch.zeros(rows, BLOCKS, dtype=torch.bool)
    for row in range(rows):
        cuts = sorted(draw(st.lists(st.integers(1, TOKENS), min_size=1, max_size=4, unique=True)))
        for index, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
            document_ids[row, start:end] = index
        chosen = sorted(draw(st.lists(st.integers(0, cuts[-1] - 1), max_size=BLOCKS, unique=True)))
        position[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        valid[row, : len(chosen)] = True
    window = draw(st.one_of(st.none(), st.integers(1, TOKENS)))
    causal = window is not None and draw(st.booleans())
    return Anchors(position, valid), document_ids, block_size, Layout(window, causal)


def undo_tiles(mask: TileMask, like: Tensor) -> Tensor:
    dense = torch.zeros_like(like)
    for row, tiles in enumerate(mask.rows):
        for number, tile in enumerate(tiles):
            first = number * mask.queries
            last = first + tile.visible.shape[2]
            width = tile.context[1] - tile.context[0]
            dense[row, 0, first:last, slice(*tile.context)] = tile.visible[0, 0, :, :width]
            dense[row, 0, first:last, mask.context + first : mask.context + last] = tile.visible[0, 0, :, width:]
    return dense


@given(masks())
@settings(max_examples=40, deadline=None)
def test_dense_and_tiled_masks_equal_the_rule_one_element_at_a_time(case: tuple[Anchors, Tensor, int, Layout]) -> None:
    anchors, document_ids, block_size, layout = case
    expected = naive_mask(anchors, document_ids, block_size, layout.window, layout.causal)
    seen = spans(anchors, document_ids, block_size, layout)
    assert torch.equal(dense_mask(seen), expected)
    assert torch.equal(undo_tiles(tile_mask(seen, block_size), expected), expected)


@given(masks())
@settings(max_examples=40, deadline=None)
def test_the_block_mask_decides_as_the_rule_and_skips_no_visible_tile(
    case: tuple[Anchors, Tensor, int, Layout],
) -> None:
    anchors, document_ids, block_size, layout = case
    expected = naive_mask(anchors, document_ids, block_size, layout.window, layout.causal)
    mask = block_mask(spans(anchors, document_ids, block_size, layout))
    B, _, Q, S = expected.shape
    assert mask.shape == (B, 1, Q, S)
    assert torch.equal(create_mask(mask.mask_mod, B, 1, Q, S, device="cpu"), expected)
    assert torch.equal(visited_tiles(mask), any_in_tiles(expected))


def visited_tiles(mask: object) -> Tensor:
    """Tiles in the lists of partial or full tiles, read as flex reads them."""
    some = listed(mask.kv_num_blocks, mask.kv_indices)  # type: ignore[attr-defined]
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)  # type: ignore[attr-defined]
    assert not (some & full).any()
    transposed = listed(mask.q_num_blocks, mask.q_indices)  # type: ignore[attr-defined]
    assert torch.equal(transposed.mT, some)
    return some | full


def listed(count: Tensor, order: Tensor) -> Tensor:
    grid = torch.zeros(order.shape, dtype=torch.bool)
    first = torch.arange(order.shape[-1]) < count[..., None]
    return grid.scatter(-1, order.long(), first)


def any_in_tiles(dense: Tensor) -> Tensor:
    Q, S = dense.shape[-2:]
    padded = torch.nn.functional.pad(dense, (0, -S % TILE, 0, -Q % TILE))
    return padded.unflatten(2, (-1, TILE)).unflatten(4, (-1, TILE)).any(5).any(3)


def large_case(window: int | None) -> tuple[Spans, int]:
    """Long enough for full, partial and skipped tiles of 128."""
    block_size, tokens, blocks = 16, 700, 40
    document_ids = torch.cat([torch.zeros(420), torch.ones(200), torch.full((80,), -1)]).long()[None]
    generator = torch.Generator().manual_seed(3)
    position = torch.randperm(600, generator=generator)[:blocks].sort().values[None]
    valid = torch.ones(1, blocks, dtype=torch.bool)
    valid[:, -5:] = False
    position[:, -5:] = 0
    return spans(Anchors(position, valid), document_ids, block_size, Layout(window, window is not None)), tokens


@pytest.mark.parametrize("window", [None, 150])
def test_flex_sdpa_and_tiles_give_the_same_values_where_tiles_are_full_partial_and_skipped(window: int | None) -> None:
    seen, tokens = large_case(window)
    mask = block_mask(seen)
    skipped = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert (skipped < mask.kv_indices.shape[-1]).any()
    if window is None:
        assert mask.full_kv_num_blocks.any()
    generator = torch.Generator().manual_seed(0)
    Q = seen.own_start.shape[1]
    query = torch.randn(1, 4, Q, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, tokens + Q, 16, generator=generator).unbind(0)
    dense = sdpa_kernel(query, key, value, dense_mask(seen), 0.25)
    torch.testing.assert_close(flex_kernel(query, key, value, mask, 0.25), dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tiled_kernel(query, key, value, tile_mask(seen, 16), 0.25), dense, atol=1e-5, rtol=1e-5)
    compiled = torch.compile(flex_kernel, backend="inductor")(query, key, value, mask, 0.25)
    torch.testing.assert_close(compiled, dense, atol=1e-5, rtol=1e-5)


def test_a_tile_dropped_from_the_block_mask_changes_compiled_flex_so_the_comparison_can_fail() -> None:
    seen, tokens = large_case(None)
    mask = block_mask(seen)
    mask.full_kv_num_blocks.zero_()
    generator = torch.Generator().manual_seed(0)
    Q = seen.own_start.shape[1]
    query = torch.randn(1, 4, Q, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, tokens + Q, 16, generator=generator).unbind(0)
    dense = sdpa_kernel(query, key, value, dense_mask(seen), 0.25)
    compiled = torch.compile(flex_kernel, backend="inductor")(query, key, value, mask, 0.25)
    assert not torch.allclose(compiled, dense, atol=1e-3)


@given(masks(rows=1, block_size=3), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_flex_sdpa_and_tiles_give_the_values_of_a_naive_softmax_on_any_documents_anchors_and_windows(
    case: tuple[Anchors, Tensor, int, Layout], seed: int
) -> None:
    anchors, document_ids, block_size, layout = case
    rule = naive_mask(anchors, document_ids, block_size, layout.window, layout.causal)
    seen = spans(anchors, document_ids, block_size, layout)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, rule.shape[2], 16, generator=generator)
    key, value = torch.randn(2, 1, 2, rule.shape[3], 16, generator=generator).unbind(0)
    expected = naive_attention(query, key, value, rule, 0.25)
    for kernel, mask in (
        (flex_kernel, block_mask(seen)),
        (sdpa_kernel, dense_mask(seen)),
        (tiled_kernel, tile_mask(seen, block_size)),
    ):
        got = kernel(query, key, value, mask, 0.25)  # type: ignore[arg-type]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@given(masks())
@settings(max_examples=60, deadline=None)
def test_no_query_is_fully_masked_and_padded_blocks_see_only_themselves(
    case: tuple[Anchors, Tensor, int, Layout],
) -> None:
    anchors, document_ids, block_size, layout = case
    mask = dense_mask(spans(anchors, document_ids, block_size, layout))
    assert mask.any(-1).all()
    padded = ~anchors.valid.repeat_interleave(block_size, 1)
    assert not mask[:, 0, :, : document_ids.shape[1]][padded].any()


def naive_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


@given(masks(), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_gradients_of_dense_and_tiled_sdpa_equal_those_of_a_naive_softmax(
    case: tuple[Anchors, Tensor, int, Layout], seed: int
) -> None:
    anchors, document_ids, block_size, layout = case
    seen = spans(anchors, document_ids, block_size, layout)
    dense = dense_mask(seen)
    B, _, Q, S = dense.shape
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, 4, Q, 8), (B, 2, S, 8), (B, 2, S, 8))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    upstream = torch.randn(B, 4, Q, 8, generator=generator, dtype=torch.float64)

    def gradients(kernel: object, mask: object) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = kernel(*leaves, mask, 0.3)  # type: ignore[operator]
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    expected = gradients(naive_attention, dense)
    for got in (gradients(sdpa_kernel, dense), gradients(tiled_kernel, tile_mask(seen, block_size))):
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, atol=1e-9, rtol=1e-9)
