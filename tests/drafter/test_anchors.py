"""Anchors: legal, sorted, distinct, and the same whatever the packing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.drafter.anchors import Anchors, candidates, draw_anchors
from tests.drafter.parts import make_rows


def drawn(
    loss_mask: Tensor, document_ids: Tensor, doc_ids: list[list[int]], most: int = 1000, epoch: int = 0
) -> Anchors:
    return draw_anchors(loss_mask, document_ids, doc_ids, block_size=4, max_anchors=most, seed=5, epoch=epoch)


def naive_candidates(loss_mask: Tensor, document_ids: Tensor, block_size: int) -> Tensor:
    found = torch.zeros_like(loss_mask)
    rows, tokens = loss_mask.shape
    for row in range(rows):
        for p in range(tokens):
            inside = all(
                p + k < tokens and document_ids[row, p + k] == document_ids[row, p] >= 0 for k in range(block_size)
            )
            found[row, p] = inside and bool(loss_mask[row, p]) and bool(loss_mask[row, p + 1])
    return found


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(2, 7), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_blocks_start_only_where_two_tokens_are_supervised_and_the_whole_block_is_in_its_document(
    lengths: list[int], block_size: int, seed: int
) -> None:
    rows = make_rows([lengths], tokens=50, supervised=0.7, seed=seed)
    expected = naive_candidates(rows.loss_mask, rows.document_ids, block_size)
    assert torch.equal(candidates(rows.loss_mask, rows.document_ids, block_size), expected)


def test_anchors_are_sorted_distinct_legal_and_as_many_as_fit() -> None:
    rows = make_rows([[30, 20]], tokens=60, supervised=0.8)
    legal = candidates(rows.loss_mask, rows.document_ids, 4)[0].nonzero().flatten()
    for most in (5, 1000):
        anchors = drawn(rows.loss_mask, rows.document_ids, [[0, 1]], most)
        chosen = anchors.position[0][anchors.valid[0]]
        assert len(chosen) == min(most, len(legal))
        assert (chosen.diff() > 0).all()
        assert torch.isin(chosen, legal).all()
        assert anchors.valid[0, : len(chosen)].all()
        assert (anchors.position[~anchors.valid] == 0).all()


def test_a_document_draws_the_same_anchors_alone_and_packed_in_any_row() -> None:
    alone = make_rows([[30], [20]], tokens=60)
    packed = make_rows([[20, 30]], tokens=60)
    # keys of both documents compete in a packed row, so all candidates are taken and their order by key compared
    keep = 50
    a = drawn(alone.loss_mask, alone.document_ids, [[7], [9]], keep)
    b = drawn(packed.loss_mask, packed.document_ids, [[9, 7]], keep)
    first = a.position[1][a.valid[1]]
    second = a.position[0][a.valid[0]] + 20
    assert torch.equal(torch.cat([first, second]), b.position[0][b.valid[0]])


def test_a_row_keeps_the_smallest_keys_so_fewer_anchors_are_a_subset_of_more() -> None:
    rows = make_rows([[30, 25]], tokens=60)
    few = drawn(rows.loss_mask, rows.document_ids, [[3, 4]], 8)
    more = drawn(rows.loss_mask, rows.document_ids, [[3, 4]], 20)
    assert torch.isin(few.position, more.position).all()


def test_epochs_and_documents_draw_differently_and_repeats_draw_the_same() -> None:
    rows = make_rows([[50]], tokens=60)
    first = drawn(rows.loss_mask, rows.document_ids, [[3]], 8)
    again = drawn(rows.loss_mask, rows.document_ids, [[3]], 8)
    assert torch.equal(first.position, again.position)
    for other in (
        drawn(rows.loss_mask, rows.document_ids, [[3]], 8, epoch=1),
        drawn(rows.loss_mask, rows.document_ids, [[4]], 8),
    ):
        assert not torch.equal(first.position, other.position)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    rows = make_rows([[50]], tokens=60)
    drawn(rows.loss_mask, rows.document_ids, [[3]], 8)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_row_without_a_legal_position_gets_padding_only() -> None:
    rows = make_rows([[3, 2], []], tokens=10)
    anchors = drawn(rows.loss_mask, rows.document_ids, [[0, 1], []], 4)
    assert anchors.position.shape == (2, 4)
    assert not anchors.valid.any()
