"""Rows and batches: documents side by side in rows of a fixed number of tokens, in a resumable order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.config import DataOptions
from dflash.data.documents import Document, DocumentStore
from dflash.data.order import pack_rows, shuffled, too_long

# streams of the shuffle: documents before packing, rows after it
_DOCUMENTS, _ROWS = 0, 1


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of B rows of T tokens; a row holds one or more documents, then padding."""

    # [B, T] int64 tokens; padding is the store's pad token
    input_ids: Tensor
    # [B, T] bool, true where the token is an assistant's
    loss_mask: Tensor
    # [B, T] int64, from 0 in each document; 0 at padding
    position_ids: Tensor
    # [B, T] int64: number of the document in its row, -1 at padding
    document_ids: Tensor
    # store ids of each row's documents, in their order in the row; empty for a row that only fills up the batch
    doc_ids: tuple[tuple[int, ...], ...]
    epoch: int
    # number of the batch in its epoch
    index: int


def plan_epoch(store: DocumentStore, options: DataOptions, seed: int, epoch: int) -> list[list[int]]:
    """Rows of document indices for one epoch, every document exactly once; a pure function of its arguments.

    Raises DataError when a document is longer than options.row_tokens.
    """
    lengths = store.lengths
    if (longest := int(lengths.max())) > options.row_tokens:
        raise too_long(longest, options.row_tokens, store.where)
    order = shuffled(len(store), seed, epoch, _DOCUMENTS)
    if not options.pack:
        return [[int(index)] for index in order]
    rows = pack_rows(lengths.tolist(), options.row_tokens, order.tolist())
    # first-fit leaves its emptiest rows at the end: spread them
    return [rows[i] for i in shuffled(len(rows), seed, epoch, _ROWS)]


def batches_per_epoch(store: DocumentStore, options: DataOptions, seed: int, epoch: int) -> int:
    """Micro-batches of one epoch; the last may hold filling rows."""
    return -(-len(plan_epoch(store, options, seed, epoch)) // options.batch_rows)


def batches(
    store: DocumentStore, options: DataOptions, seed: int, start: tuple[int, int] = (0, 0), epochs: int | None = None
) -> Iterator[Batch]:
    """Batches from position `start` = (epoch, index) to the end of epoch `epochs`-1 (none: for ever).

    The batch at a position is the same whatever the start. B is always options.batch_rows: the last batch of an epoch
    is filled up with empty rows. T is row_tokens, or, unpacked, the smallest bucket that holds the batch's documents.
    """
    epoch, index = start
    while epochs is None or epoch < epochs:
        rows = plan_epoch(store, options, seed, epoch)
        for position in range(index, -(-len(rows) // options.batch_rows)):
            yield batch_at(store, options, rows, (epoch, position))
        epoch, index = epoch + 1, 0


def batch_at(
    store: DocumentStore, options: DataOptions, rows: Sequence[Sequence[int]], position: tuple[int, int]
) -> Batch:
    """The batch at `position` = (epoch, index), from that epoch's rows as `plan_epoch` gives them."""
    chosen = list(rows[position[1] * options.batch_rows : (position[1] + 1) * options.batch_rows])
    chosen += [[]] * (options.batch_rows - len(chosen))
    documents = [[store[i] for i in row] for row in chosen]
    tokens = options.row_tokens if options.pack else _bucket(documents, options.row_tokens)
    return collate(documents, tokens, store.meta.pad_id, position=position)


def collate(
    rows: Sequence[Sequence[Document]], row_tokens: int, pad_id: int, position: tuple[int, int] = (0, 0)
) -> Batch:
    """Lays documents one after the other in rows of `row_tokens`. Raises DataError when a row's do not fit."""
    shape = (len(rows), row_tokens)
    input_ids, loss_mask = np.full(shape, pad_id, dtype=np.int64), np.zeros(shape, dtype=bool)
    position_ids, document_ids = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    for b, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row):
            end = at + len(document)
            if end > row_tokens:
                raise too_long(end, row_tokens, document.source)
            input_ids[b, at:end], loss_mask[b, at:end] = document.input_ids, document.loss_mask
            position_ids[b, at:end], document_ids[b, at:end] = np.arange(len(document)), number
            at = end
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.from_numpy(position_ids),
        document_ids=torch.from_numpy(document_ids),
        doc_ids=tuple(tuple(d.id for d in row) for row in rows),
        epoch=position[0],
        index=position[1],
    )


def _bucket(rows: Sequence[Sequence[Document]], row_tokens: int) -> int:
    """The smallest of row_tokens/4, /2, /1 that holds the longest document: few widths, so few compilations."""
    longest = max((len(d) for row in rows for d in row), default=0)
    return next(t for t in (-(-row_tokens // 4), -(-row_tokens // 2), row_tokens) if t >= longest)
