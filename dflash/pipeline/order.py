"""Which micro-batch comes when: one order for the whole run, of which every rank reads its own part."""

from collections.abc import Iterator

from dflash.config import DataOptions
from dflash.data.documents import DocumentStore
from dflash.data.rows import Batch, batch_at, batches_per_epoch, plan_epoch
from dflash.pipeline.placement import Layout


class Order:
    """The micro-batches of a run from any position; a pure function of data, options and seed."""

    def __init__(self, store: DocumentStore, options: DataOptions, seed: int) -> None:
        self._store, self._options, self._seed = store, options, seed
        # of the epoch asked for last: planning a million documents takes seconds
        self._counted: tuple[int, int] = (-1, 0)

    def after(self, epoch: int, index: int, count: int) -> tuple[int, int]:
        """The position `count` micro-batches further on: (epoch of the last of them, its index + 1)."""
        for _ in range(count):
            if index >= self._count(epoch):
                epoch, index = epoch + 1, 0
            index += 1
        return epoch, index

    def stream(self, epoch: int, index: int, layout: Layout) -> Iterator[Batch]:
        """For ever, from a position that begins a step: the micro-batches that `layout` gives to this rank."""
        own, place = set(layout.own), 0
        while True:
            rows = plan_epoch(self._store, self._options, self._seed, epoch)
            for position in range(index, -(-len(rows) // self._options.batch_rows)):
                if place % layout.micro_batches in own:
                    yield batch_at(self._store, self._options, rows, (epoch, position))
                place += 1
            epoch, index = epoch + 1, 0

    def _count(self, epoch: int) -> int:
        if self._counted[0] != epoch:
            self._counted = (epoch, batches_per_epoch(self._store, self._options, self._seed, epoch))
        return self._counted[1]
