"""How a target's work gets to a drafter's device: streams of its own, events instead of waiting, memory kept alive."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash.data.rows import Batch
from dflash.drafter.anchors import Anchors
from dflash.features import Features


@dataclass(frozen=True)
class Work:
    """A micro-batch as a drafter takes it: everything on its device.

    features: none when no anchor is valid. tokens: context tokens, padding not counted. ready: recorded on the stream
    that brought it; none where nothing is asynchronous.
    """

    batch: Batch
    anchors: Anchors
    features: Features | None
    tokens: int
    ready: torch.cuda.Event | None = None

    def tensors(self) -> list[Tensor]:
        """All that the drafter will read."""
        batch, anchors = self.batch, self.anchors
        rows = [batch.input_ids, batch.loss_mask, batch.position_ids, batch.document_ids]
        seen = [] if self.features is None else [self.features.hidden, self.features.last]
        return [*rows, anchors.position, anchors.valid, *seen]


class HostLane:
    """A CPU: what is computed is there."""

    asynchronous = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Round the target's forward."""
        yield

    def tokens(self, batch: Batch) -> Batch:
        """The batch as the target reads it."""
        return batch

    def send(self, work: Work, destination: torch.device) -> Work:
        """The same work."""
        return work


class GpuLane:
    """The streams of one target thread on a GPU: one to compute on, one a drafter device to copy on."""

    asynchronous = True

    def __init__(self, source: torch.device, destinations: Sequence[torch.device]) -> None:
        """Streams from torch's pool: they do not wait for the default stream, on which drafters compute."""
        self.source = source
        self._compute = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(source)  # type: ignore[no-untyped-call]
        self._into = {d: torch.cuda.Stream(d) for d in set(destinations)}  # type: ignore[no-untyped-call]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Round the target's forward: the calling thread's current stream is this lane's; restored on exit."""
        with torch.cuda.device(self.source), torch.cuda.stream(self._compute):
            yield

    def tokens(self, batch: Batch) -> Batch:
        """The tokens on the target's device; from pinned memory, so that the host does not wait."""
        return replace(batch, input_ids=batch.input_ids.pin_memory().to(self.source, non_blocking=True))

    def send(self, work: Work, destination: torch.device) -> Work:
        """Starts the copies after what `computing` has launched, and records an event; the host does not wait."""
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(self._compute)
        self._out.wait_event(computed)
        into = self._into[destination]
        into.wait_event(computed)
        # the copy runs on the source's current stream, the memory comes from the destination's: both are ours
        with torch.cuda.stream(self._out), torch.cuda.stream(into):
            moved = _moved(work, destination)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(into)
        if work.features is not None:
            for tensor in (work.features.hidden, work.features.last):
                tensor.record_stream(self._out if destination != self.source else into)
        return replace(moved, ready=ready)


def lane(source: torch.device, destinations: Sequence[torch.device]) -> HostLane | GpuLane:
    """The lane of a target thread on `source`."""
    return GpuLane(source, destinations) if source.type == "cuda" else HostLane()


def receive(work: Work) -> None:
    """Called by the drafter thread: its stream waits for the work, and keeps the memory until it has read it."""
    if work.ready is None:
        return
    stream = torch.cuda.current_stream(work.anchors.position.device)
    stream.wait_event(work.ready)
    for tensor in work.tensors():
        tensor.record_stream(stream)


def settle(work: Work) -> None:
    """Returns when the work has arrived; the target thread calls it when it has launched the next."""
    if work.ready is not None:
        work.ready.synchronize()


def _moved(work: Work, destination: torch.device) -> Work:
    batch, anchors, features = work.batch, work.anchors, work.features
    if features is not None:
        features = Features(_sent(features.hidden, destination), _sent(features.last, destination))
    placed = Anchors(_sent(anchors.position, destination), _sent(anchors.valid, destination))
    rows = replace(
        batch,
        input_ids=_sent(batch.input_ids, destination),
        loss_mask=_sent(batch.loss_mask, destination),
        position_ids=_sent(batch.position_ids, destination),
        document_ids=_sent(batch.document_ids, destination),
    )
    return replace(work, batch=rows, anchors=placed, features=features)


def _sent(tensor: Tensor, destination: torch.device) -> Tensor:
    source = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return source.to(destination, non_blocking=True)
