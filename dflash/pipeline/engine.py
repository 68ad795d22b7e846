"""The steps of a run, computed by the threads of a pipeline: targets -> ordered feed -> drafters -> one update."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from dflash.data.rows import Batch
from dflash.features import Features, FeatureSource
from dflash.pipeline.counts import Counted
from dflash.pipeline.crew import Crew, StillRunning, named_in_errors
from dflash.pipeline.feed import Feed, FeedClosed, FeedStats
from dflash.pipeline.gradients import Replicas
from dflash.pipeline.memory import memory_errors
from dflash.pipeline.placement import Layout
from dflash.pipeline.streams import GpuLane, HostLane, Work, lane, receive, settle
from dflash.pipeline.workers import Claim, Claims, DrafterWorker, Seat, TargetWorker
from dflash.step import Stepper, StepResult, context_tokens, identity

# a side that waited for less than this share of the time is not waited for by anyone
IDLE_SHARE = 0.02


@dataclass(frozen=True)
class Settings:
    """How the pipeline behaves, not what it computes."""

    # micro-batches in the feed
    queue_depth: int = 4
    # deaths of target threads that are made good
    restarts: int = 0
    # told whenever something has moved
    beat: Callable[[str], None] = lambda what: None


@dataclass(frozen=True)
class Flow:
    """The feed since the last look. Waiting times are means over the threads of a side, in milliseconds."""

    queued: int
    depth: int
    # a target thread waited for room; a drafter thread for features
    put_wait_ms: float
    take_wait_ms: float
    # time between the looks
    elapsed_ms: float
    # target threads that died and were replaced: one line each
    restarted: tuple[str, ...] = ()

    @property
    def bottleneck(self) -> str:
        """The side that the other waits for: targets, drafters or neither."""
        if max(self.put_wait_ms, self.take_wait_ms) < IDLE_SHARE * self.elapsed_ms:
            return "neither"
        return "targets" if self.take_wait_ms > self.put_wait_ms else "drafters"

    def __str__(self) -> str:
        return f"queue {self.queued}/{self.depth}, waits for {self.bottleneck}"


class Pipeline:
    """Threads while `running`; `step` is called by the main thread, step after step.

    The numbers of micro-batches fix who computes what and in which order sums are taken, so neither the number of
    target threads nor their speed changes a bit of the result.
    """

    def __init__(
        self, steppers: Sequence[Stepper], sources: Sequence[FeatureSource], layout: Layout, settings: Settings
    ) -> None:
        """`steppers`: one a drafter thread, the first holds masters and optimizer; `sources`: one a target thread."""
        self.steppers, self._sources, self._layout, self._settings = steppers, sources, layout, settings
        self._lead = steppers[0]
        self._replicas = Replicas([stepper.parts.parameters for stepper in steppers])
        drafters = len(steppers)
        self._feed = Feed[Work](settings.queue_depth, len(sources), drafters)
        self._go, self._done = Feed[None](drafters, 1, drafters), Feed[list[Counted]](drafters, drafters, 1)
        self._crew = Crew(self._close, settings.restarts)
        self._first = 0
        self._seen = FeedStats(0, 0, 0, 0.0, 0.0)
        self._seen_s = time.perf_counter()
        self._told = 0

    @contextmanager
    def running(self, stream: Iterator[Batch], first: int, total: int) -> Iterator[None]:
        """The time in which the threads live; joins them, whatever ended it. StillRunning: one does not end.

        For steps `first` .. `total` - 1; `stream` begins with the first micro-batch of step `first`.
        """
        self._start(stream, first, total)
        try:
            yield
        except BaseException as error:
            if alive := self._crew.join():
                error.add_note(f"still running: {', '.join(alive)}")
            raise
        if alive := self._crew.join():
            raise StillRunning(f"{', '.join(alive)} did not end in time")

    def _start(self, stream: Iterator[Batch], first: int, total: int) -> None:
        drafters, steps = len(self.steppers), total - first
        self._first = first
        # weights that came from a checkpoint; gradients that a warm-up left
        self._replicas.sum_gradients()
        self._replicas.spread_weights()
        claims = Claims(stream, steps * len(self._layout.own))
        places = [stepper.parts.device for stepper in self.steppers]
        for index, source in enumerate(self._sources):
            assert source.target is not None
            way = lane(source.target.device, places)
            worker = TargetWorker(
                claims, self._feed, partial(self._compute, source, way), identity, settle if way.asynchronous else None
            )
            self._crew.start(f"target-{index}", worker.run, restartable=True, at_end=self._feed.leave_producer)
        for index in range(drafters):
            self._crew.start(f"drafter-{index}", partial(self._draft, index, steps), at_end=self._feed.leave_consumer)

    def step(self, number: int) -> StepResult:
        """Optimizer step `number`. Raises what any thread has raised, as it was."""
        began = time.perf_counter()
        self.check()
        self._lead.parts.optimizer.zero_grad(set_to_none=True)
        counted = self._shares((number - self._first) * len(self.steppers))
        self._replicas.sum_gradients()
        result = self._lead.update(number, counted, began)
        if result.applied:
            self._replicas.spread_weights()
        self._settings.beat(f"step {number + 1}")
        return result

    def check(self) -> None:
        """Raises the first failure of any thread; for the main thread while it does something else."""
        self._crew.check()

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`, from any thread."""
        self._crew.fail(error)

    def flow(self) -> Flow:
        """What the feed did since the last call."""
        now, now_s, before = self._feed.stats(), time.perf_counter(), self._seen
        flow = Flow(
            queued=now.queued,
            depth=self._feed.depth,
            put_wait_ms=(now.put_wait_s - before.put_wait_s) / len(self._sources) * 1e3,
            take_wait_ms=(now.take_wait_s - before.take_wait_s) / len(self.steppers) * 1e3,
            elapsed_ms=(now_s - self._seen_s) * 1e3,
            restarted=tuple(self._crew.restarted[self._told :]),
        )
        self._told += len(flow.restarted)
        self._seen, self._seen_s = now, now_s
        return flow

    def _close(self, error: BaseException | None) -> None:
        for feed in (self._feed, self._go, self._done):
            feed.close(error)

    def _shares(self, base: int) -> Counted:
        """Lets all drafters compute their shares of a step and adds the counts in the order of the micro-batches."""
        drafters = range(len(self.steppers))
        try:
            for drafter in drafters:
                self._go.put(base + drafter, None)
            by_place: dict[int, Counted] = {}
            for drafter in drafters:
                counts = self._done.take(base + drafter)
                by_place |= zip(self._layout.share(drafter), counts, strict=True)
        except FeedClosed:
            self.check()
            raise
        total = Counted()
        for place in sorted(by_place):
            total += by_place[place].to(self._lead.parts.device)
        return total

    # ---- in the threads

    def _compute(self, source: FeatureSource, way: HostLane | GpuLane, claim: Claim[Batch]) -> Work:
        """A target thread's part: anchors, features, and the way to the drafter that will take them."""
        batch = claim.batch
        assert source.target is not None
        device = source.target.device
        anchors, features = self._lead.anchors(batch), None
        with way.computing(), memory_errors("target", device, identity(batch)):
            if anchors.valid.any():
                features = _features(source, way, batch)
            work = Work(batch, anchors, features, context_tokens(batch))
            work = way.send(work, self.steppers[self._layout.drafter(claim.number)].parts.device)
        self._settings.beat(f"features of {identity(batch)}")
        return work

    def _draft(self, index: int, steps: int) -> None:
        stepper, share = self.steppers[index], self._layout.share(index)
        seat = Seat(index, len(self.steppers), share, len(self._layout.own))
        worker = DrafterWorker(seat, self._go, self._feed, self._done, partial(self._count, index, stepper))
        with _current(stepper.parts.device), stepper.parts.attention.strategy.thread_scope():
            worker.run(steps)

    def _count(self, index: int, stepper: Stepper, works: Iterator[Work]) -> list[Counted]:
        """A drafter thread's part of a step."""
        counts = []
        for work in works:
            receive(work)
            with named_in_errors(partial(_place, index, work.batch)):
                counts.append(stepper.count_features(work.batch, work.features, work.anchors, work.tokens))
            self._settings.beat(f"drafter {index}: {identity(work.batch)}")
        return counts


def _features(source: FeatureSource, way: HostLane | GpuLane, batch: Batch) -> Features:
    # a store looks its documents up by their tokens, on the host
    read = way.tokens(batch) if source.mode == "online" else batch
    assert source.target is not None
    return source.rows(read, source.target.device)


def _place(index: int, batch: Batch) -> str:
    return f"in drafter-{index}, {identity(batch)}"


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the calling thread's current one; restored on exit."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
