"""Features: what the drafter sees of the target, and where a batch gets them from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dflash.feature_store import FeatureStore
    from dflash.target import Target

Mode = Literal["online", "cache", "offline"]


@dataclass(frozen=True)
class Features:
    """Target activations of one document [T, ...] or of a batch of rows [B, T, ...].

    hidden  [..., T, L, H]  outputs of the chosen target layers, in the order of the layer ids, before any final norm
    last    [..., T, H]     what the target's head reads: the last layer's output, final norm applied exactly once
    """

    hidden: Tensor
    last: Tensor


class PackedRows(Protocol):
    """The part of data.rows.Batch that is read here."""

    @property
    def input_ids(self) -> Tensor:
        """[B, T] tokens."""
        ...

    @property
    def document_ids(self) -> Tensor:
        """[B, T] number of the document in its row, -1 at padding."""
        ...

    @property
    def doc_ids(self) -> tuple[tuple[int, ...], ...]:
        """Store ids of each row's documents, in their order in the row."""
        ...


class FeatureSource:
    """Features of batches, computed document by document, so that packing, order and mode never change a bit.

    online   the target computes them                     cache    the same, kept in the store for the next time
    offline  the store has them all; the target never runs
    """

    def __init__(
        self, target: "Target | None", store: "FeatureStore | None", mode: Mode, layer_ids: Sequence[int]
    ) -> None:
        """`target` may be none offline, `store` must be none online; each mode needs what it uses."""
        assert (store is None) == (mode == "online"), "the store belongs to the modes cache and offline"
        assert target is not None or mode == "offline", "only the mode offline needs no target"
        self.target, self.store, self.mode, self.layer_ids = target, store, mode, list(layer_ids)

    def document(self, document_id: int, input_ids: Tensor) -> Features:
        """Features of one document [T]: hidden [T, L, H], last [T, H]. DataError: not in the store, or damaged."""
        if self.store is None:
            assert self.target is not None
            return self.target.features(input_ids, self.layer_ids)
        from dflash.feature_store import ids_hash

        key = ids_hash(input_ids)
        if self.mode == "offline" or self.store.has(document_id, key):
            return self.store.get(document_id, key)
        assert self.target is not None
        features = self.target.features(input_ids, self.layer_ids)
        self.store.put(document_id, key, features)
        return features

    def close(self) -> None:
        """Writes what the store still buffers; call it when training ends or stops."""
        if self.store is not None:
            self.store.flush()

    def rows(self, batch: PackedRows, device: torch.device | str | None = None) -> Features:
        """Features of a batch: hidden [B, T, L, H], last [B, T, H], zero at padding; on `device` or the target's."""
        if device is None:
            device = self.target.device if self.target is not None else "cpu"
        B, T = batch.input_ids.shape
        hidden, last = torch.empty(0), torch.empty(0)
        for row, start, document_id, input_ids in _documents(batch):
            found = self.document(document_id, input_ids)
            if hidden.numel() == 0:
                hidden = torch.zeros(B, T, *found.hidden.shape[1:], dtype=found.hidden.dtype, device=device)
                last = torch.zeros(B, T, found.last.shape[-1], dtype=found.last.dtype, device=device)
            hidden[row, start : start + len(input_ids)] = found.hidden.to(device)
            last[row, start : start + len(input_ids)] = found.last.to(device)
        assert hidden.numel(), "a batch has at least one document"
        return Features(hidden, last)


def _documents(batch: PackedRows) -> Iterator[tuple[int, int, int, Tensor]]:
    """(row, first position, store id, tokens [t]) of every document of a batch."""
    places = batch.document_ids.cpu()
    for row, store_ids in enumerate(batch.doc_ids):
        for number, store_id in enumerate(store_ids):
            inside = (places[row] == number).nonzero()
            start, end = int(inside[0]), int(inside[-1]) + 1
            yield row, start, store_id, batch.input_ids[row, start:end]
