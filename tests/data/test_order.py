"""Packing and shuffling place every document exactly once, whatever the lengths and the resume point."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.order import pack_rows, shuffled
from dflash.errors import DataError

ROW = 32
LENGTHS = st.lists(st.integers(1, ROW), min_size=1, max_size=60)


def first_fit_slowly(lengths: list[int], row_tokens: int, order: list[int]) -> list[list[int]]:
    """The oracle: look at every row from the first on."""
    rows: list[list[int]] = []
    for index in order:
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[index] <= row_tokens:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 5))
def test_packing_is_first_fit_as_a_plain_loop_does_it(lengths: list[int], seed: int) -> None:
    order = shuffled(len(lengths), seed, 0, 0).tolist()
    assert pack_rows(lengths, ROW, order) == first_fit_slowly(lengths, ROW, order)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 5))
def test_every_document_is_in_exactly_one_row_and_no_row_is_too_full(lengths: list[int], seed: int) -> None:
    rows = pack_rows(lengths, ROW, shuffled(len(lengths), seed, 0, 0).tolist())
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= ROW for row in rows)


def test_short_documents_share_rows_and_full_ones_do_not() -> None:
    assert len(pack_rows([8] * 16, ROW, range(16))) == 4
    assert len(pack_rows([ROW] * 16, ROW, range(16))) == 16


def test_a_document_of_exactly_a_row_fits_and_one_token_more_is_an_error() -> None:
    assert pack_rows([ROW], ROW, [0]) == [[0]]
    with pytest.raises(DataError, match="at most 32 tokens, got one of 33"):
        pack_rows([ROW + 1], ROW, [0])


@given(st.integers(0, 200), st.integers(-5, 2**40), st.integers(0, 9))
def test_a_shuffle_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(count, seed, epoch, 0).tolist()) == list(range(count))


@pytest.mark.parametrize("other", [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_seed_epoch_and_stream_each_change_the_shuffle(other: tuple[int, int, int]) -> None:
    first, again = shuffled(50, 1, 0, 0), shuffled(50, 1, 0, 0)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, shuffled(50, *other))


def test_the_shuffle_is_the_same_in_every_version() -> None:
    """Literal values: a run resumed after an upgrade must see the order it began with."""
    assert shuffled(8, 0, 0, 0).tolist() == [1, 0, 4, 6, 7, 2, 3, 5]
    assert shuffled(8, 7, 3, 1).tolist() == [2, 7, 3, 6, 4, 0, 5, 1]


def test_shuffles_spread_a_document_over_all_places() -> None:
    places = np.array([int(np.flatnonzero(shuffled(10, seed, 0, 0) == 0)[0]) for seed in range(1000)])
    counts = np.bincount(places, minlength=10)
    assert counts.min() > 60
    assert counts.max() < 140
