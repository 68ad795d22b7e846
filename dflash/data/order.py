"""The order of an epoch: shuffling and packing as pure functions, so a resumed run needs only (epoch, position)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.errors import DataError


def shuffled(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends on nothing but the arguments.

    Own arithmetic (the mixing function of SplitMix64, Steele et al. 2014) because numpy may change its generators'
    streams between versions, and a run resumed after an upgrade must see the same order.
    """
    key = _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64))
    for value in (epoch, stream):
        key = _mix(key ^ np.uint64(value))
    keys = _mix(key + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(keys, kind="stable")


def pack_rows(lengths: Sequence[int], row_tokens: int, order: Sequence[int]) -> list[list[int]]:
    """First-fit: each document, in `order`, goes to the first row with room. Rows of document indices.

    lengths: tokens of every document; order: the indices to place. O(n log n) by a tree over the rows' free tokens.
    Raises DataError when a document is longer than a row.
    """
    free = _FreeTokens(len(order), row_tokens)
    rows: list[list[int]] = []
    for index in order:
        length = int(lengths[index])
        if length > row_tokens:
            raise too_long(length, row_tokens)
        row = free.place(length)
        if row == len(rows):
            rows.append([])
        rows[row].append(int(index))
    return rows


def too_long(length: int, row_tokens: int, where: str = "") -> DataError:
    """The error for a document that fits in no row."""
    return DataError(
        f"documents of at most {row_tokens} tokens",
        f"one of {length}",
        "raise row_tokens, or prepare again with overlong truncate or drop",
        where=where,
    )


class _FreeTokens:
    """A tree whose leaves are the free tokens of each row and whose nodes are the maximum below them."""

    def __init__(self, rows: int, row_tokens: int) -> None:
        self._leaves = 1 << max(0, (rows - 1).bit_length())
        self._tree = [row_tokens] * (2 * self._leaves)

    def place(self, length: int) -> int:
        """Takes `length` tokens of the first row that has them; the row's number."""
        tree, node = self._tree, 1
        while node < self._leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        row = node - self._leaves
        tree[node] -= length
        node //= 2
        while node:
            left, right = tree[2 * node], tree[2 * node + 1]
            largest = left if left > right else right
            if tree[node] == largest:
                break
            tree[node] = largest
            node //= 2
        return row


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
