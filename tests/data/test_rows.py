"""Batches hold every document once, laid side by side, the same for any place a run resumes from."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.config import DataOptions
from dflash.data.rows import Batch, batches, batches_per_epoch, collate, plan_epoch
from dflash.errors import DataError
from tests.data.conftest import random_documents, store_of

ROW = 32
OPTIONS = DataOptions(row_tokens=ROW, batch_rows=3)
LENGTHS = st.lists(st.integers(1, ROW), min_size=1, max_size=40)


def same(a: Batch, b: Batch) -> bool:
    tensors = ("input_ids", "loss_mask", "position_ids", "document_ids")
    equal = all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)
    return equal and (a.doc_ids, a.epoch, a.index) == (b.doc_ids, b.epoch, b.index)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.booleans(), st.integers(1, 4))
def test_an_epoch_shows_every_document_once_with_its_own_tokens(lengths: list[int], pack: bool, rows: int) -> None:
    store = store_of(lengths)
    options = replace(OPTIONS, pack=pack, batch_rows=rows)
    seen = []
    for batch in batches(store, options, seed=0, epochs=1):
        assert batch.input_ids.shape[0] == rows
        for b, ids in enumerate(batch.doc_ids):
            for number, index in enumerate(ids):
                here = batch.document_ids[b] == number
                assert batch.input_ids[b, here].tolist() == store[index].input_ids.tolist()
                assert batch.loss_mask[b, here].tolist() == store[index].loss_mask.tolist()
                assert batch.position_ids[b, here].tolist() == list(range(len(store[index])))
                seen.append(index)
            assert int((batch.document_ids[b] >= 0).sum()) == sum(lengths[i] for i in ids)
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.booleans(), st.data())
def test_resuming_anywhere_goes_on_with_the_same_batches(lengths: list[int], pack: bool, data: st.DataObject) -> None:
    store, options = store_of(lengths), replace(OPTIONS, pack=pack)
    whole = list(batches(store, options, seed=3, epochs=3))
    at = data.draw(st.integers(0, len(whole) - 1))
    rest = list(batches(store, options, seed=3, start=(whole[at].epoch, whole[at].index), epochs=3))
    assert len(rest) == len(whole) - at
    assert all(same(a, b) for a, b in zip(rest, whole[at:], strict=True))


def test_resuming_past_the_last_batch_of_an_epoch_begins_the_next() -> None:
    store = store_of([20] * 7)
    count = batches_per_epoch(store, OPTIONS, 0, 0)
    following = next(batches(store, OPTIONS, seed=0, start=(0, count)))
    assert same(following, next(batches(store, OPTIONS, seed=0, start=(1, 0))))


def test_epochs_and_seeds_have_their_own_order() -> None:
    store = store_of([20] * 12)
    plans = [plan_epoch(store, OPTIONS, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert plans[0] == plan_epoch(store, OPTIONS, 0, 0)
    assert plans[0] != plans[1]
    assert plans[0] != plans[2]


def test_padding_is_marked_and_never_supervised() -> None:
    batch = collate([random_documents([5, 4]), []], row_tokens=12, pad_id=63)
    padding = batch.document_ids == -1
    assert padding.sum(dim=1).tolist() == [3, 12]
    assert (batch.input_ids[padding] == 63).all()
    assert not batch.loss_mask[padding].any()
    assert (batch.position_ids[padding] == 0).all()
    assert batch.doc_ids == ((0, 1), ())


def test_the_last_batch_is_filled_up_with_empty_rows_to_keep_its_shape() -> None:
    shapes = {b.input_ids.shape for b in batches(store_of([30] * 7), OPTIONS, seed=0, epochs=1)}
    last = list(batches(store_of([30] * 7), OPTIONS, seed=0, epochs=1))[-1]
    assert shapes == {(3, ROW)}
    assert [len(ids) for ids in last.doc_ids] == [1, 0, 0]


@pytest.mark.parametrize(("length", "tokens"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_unpacked_rows_take_the_smallest_of_three_widths(length: int, tokens: int) -> None:
    options = replace(OPTIONS, pack=False)
    assert next(batches(store_of([length] * 3), options, seed=0)).input_ids.shape == (3, tokens)
    assert next(batches(store_of([length] * 3), OPTIONS, seed=0)).input_ids.shape == (3, ROW)


def test_a_store_with_longer_documents_than_a_row_is_an_error() -> None:
    store = store_of([ROW, ROW - 1])
    assert plan_epoch(store, OPTIONS, 0, 0)
    with pytest.raises(DataError, match="at most 31 tokens, got one of 32"):
        plan_epoch(store, replace(OPTIONS, row_tokens=ROW - 1), 0, 0)


def test_rows_are_fuller_packed_than_unpacked() -> None:
    lengths = np.random.default_rng(0).integers(2, 12, 200).tolist()
    store = store_of(lengths)
    packed, single = (len(plan_epoch(store, replace(OPTIONS, pack=p), 0, 0)) for p in (True, False))
    assert single == 200
    assert packed < 1.2 * sum(lengths) / ROW
