"""python -m dflash.bench.stream --prompts 1000000: synthetic prompts from a store on disk through the pipeline's queue.

No model computes: what is measured is whether the host's own memory stays flat however long the data is, and that every
document comes once. The store is memory-mapped, so file pages are left out: they belong to the system, not to us.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash.bench.soak import trend
from dflash.command_line import parse
from dflash.config import DataOptions
from dflash.data.documents import Document, DocumentStore, StoreMeta
from dflash.data.rows import Batch
from dflash.pipeline.crew import Crew
from dflash.pipeline.feed import Feed, FeedClosed
from dflash.pipeline.order import Order
from dflash.pipeline.placement import Layout
from dflash.pipeline.workers import Claims, TargetWorker

VOCABULARY = 1000
# batches between two looks at the memory
LOOK = 200


@dataclass(frozen=True)
class StreamOptions:
    """What is streamed."""

    # synthetic prompts, of 8 to 64 tokens
    prompts: int = 1_000_000
    # target threads that put, into a queue of `depth`
    targets: int = 2
    depth: int = 4
    # tokens a row
    row_tokens: int = 2048
    # print one JSON object instead of lines
    json: bool = False


@dataclass(frozen=True)
class StreamResult:
    """What came out; memory is the process's own (anonymous), in MB."""

    prompts: int
    batches: int
    seconds: float
    # documents that did not come, and that came again
    lost: int
    repeated: int
    first_mb: float
    last_mb: float
    # growth over the second half, as a share of the memory
    growth: float
    peak_queue: int


def main(words: Sequence[str]) -> int:
    """Parses, streams, prints; 0 when all came once."""
    options = parse(StreamOptions(), words, prog="python -m dflash.bench.stream", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        result = stream(options, Path(folder) / "store")
    print(json.dumps(asdict(result)) if options.json else lines(result))
    return 0 if result.lost == result.repeated == 0 else 1


def stream(options: StreamOptions, directory: Path) -> StreamResult:
    """Writes the store, then takes every batch of one epoch from the queue."""
    meta = StoreMeta(VOCABULARY, "synthetic", "synthetic", options.row_tokens, pad_id=0)
    store = DocumentStore.write(directory, synthetic(options.prompts), meta)
    order = Order(store, DataOptions(row_tokens=options.row_tokens), seed=0)
    feed = Feed[tuple[tuple[int, ...], ...]](options.depth, options.targets, 1)
    crew = Crew(feed.close)
    began_s = time.monotonic()
    claims = Claims(one_epoch(order), sys.maxsize)
    for index in range(options.targets):
        worker = TargetWorker(claims, feed, lambda claim: claim.batch.doc_ids, lambda batch: f"batch {batch.index}")
        crew.start(f"target-{index}", worker.run, at_end=feed.leave_producer)
    seen, memory = np.zeros(options.prompts, dtype=np.int64), list[tuple[float, float]]()
    batches = drain(feed, seen, memory)
    crew.join()
    crew.check()
    return StreamResult(
        prompts=options.prompts,
        batches=batches,
        seconds=time.monotonic() - began_s,
        lost=int((seen == 0).sum()),
        repeated=int((seen > 1).sum()),
        first_mb=memory[0][1],
        last_mb=memory[-1][1],
        growth=trend(memory)[1],
        peak_queue=feed.stats().peak,
    )


def drain(feed: Feed[tuple[tuple[int, ...], ...]], seen: NDArray[np.int64], memory: list[tuple[float, float]]) -> int:
    """Takes until the producers have left; counts each document, looks at the memory now and then."""
    number = 0
    while True:
        try:
            rows = feed.take(number)
        except FeedClosed:
            return number
        for row in rows:
            seen[list(row)] += 1
        if number % LOOK == 0:
            memory.append((time.monotonic(), own_memory_mb()))
        number += 1


def one_epoch(order: Order) -> Iterator[Batch]:
    """The batches of the first epoch."""
    for batch in order.stream(0, 0, Layout(1)):
        if batch.epoch > 0:
            return
        yield batch


def synthetic(count: int) -> Iterator[Document]:
    """Prompts of 8 to 64 tokens."""
    tokens = np.random.default_rng(0)
    for number in range(count):
        length = 8 + number * 7919 % 57
        ids = tokens.integers(0, VOCABULARY, length, dtype=np.int32)
        yield Document(number, ids, np.ones(length, dtype=np.bool_), "synthetic")


def own_memory_mb() -> float:
    """Anonymous memory of this process that is in RAM."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux says RssAnon")


def lines(result: StreamResult) -> str:
    """The figures, readable."""
    return (
        f"{result.prompts} prompts in {result.batches} batches, {result.seconds:.1f} s: {result.lost} lost, "
        f"{result.repeated} repeated, at most {result.peak_queue} in the queue\n"
        f"own memory {result.first_mb:.0f} -> {result.last_mb:.0f} MB, {result.growth:+.1%} over the second half"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
