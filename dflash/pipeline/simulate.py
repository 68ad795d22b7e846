"""A discrete-event model of the pipeline: how many devices of each kind, and which side waits.

The same rules as the real thing: targets claim micro-batches in order, the queue has a bounded window, drafters work in
steps that all of them end together.
"""

import heapq
import math
import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plant:
    """What is simulated. Speeds are of one device alone, in context tokens a second."""

    targets: int
    drafters: int
    # one target's forward; one drafter's forward and backward
    target_tok_s: float
    drafter_tok_s: float
    # context tokens a micro-batch
    batch_tokens: int = 3072
    # micro-batches a step, over all drafters; 0: one for each
    accumulate: int = 0
    # micro-batches in the queue
    queue_depth: int = 4
    # seconds of a step in which no drafter computes: sum of gradients, optimizer, new weights
    sync_s: float = 0.0
    # standard deviation / mean of a micro-batch's time: documents differ in length
    spread: float = 0.0

    @property
    def step_batches(self) -> int:
        """Micro-batches a step."""
        return self.accumulate or self.drafters


@dataclass(frozen=True)
class Flow:
    """What came out, over `steps` steps."""

    steps: int
    seconds: float
    # context tokens a second, end to end
    tok_s: float
    # share of the time that a device of each kind computes
    target_busy: float
    drafter_busy: float
    # seconds that targets waited for room and drafters for features, summed over the devices of a kind
    put_wait_s: float
    take_wait_s: float

    @property
    def bottleneck(self) -> str:
        """The side that the other waits for."""
        return "targets" if self.take_wait_s > self.put_wait_s else "drafters"


@dataclass
class _State:
    """Times in seconds. free: when each target can claim again; taken: when each micro-batch was taken."""

    free: list[float]
    taken: list[float]
    # the latest of taken[: n - depth]: from then on micro-batch n has room
    room: float = 0.0
    put_wait_s: float = 0.0
    take_wait_s: float = 0.0
    target_busy_s: float = 0.0
    drafter_busy_s: float = 0.0


def simulate(plant: Plant, steps: int = 400, seed: int = 0) -> Flow:
    """Runs `steps` steps; the same arguments give the same result."""
    state = _State([0.0] * plant.targets, [])
    draw = random.Random(seed)
    released = 0.0
    for _ in range(steps):
        ends = [released] * plant.drafters
        for number in range(plant.step_batches):
            drafter = number % plant.drafters
            ends[drafter] = _one_batch(plant, state, draw, ends[drafter])
        released = max(ends) + plant.sync_s
    tokens = steps * plant.step_batches * plant.batch_tokens
    return Flow(
        steps=steps,
        seconds=released,
        tok_s=tokens / released,
        target_busy=state.target_busy_s / (released * plant.targets),
        drafter_busy=state.drafter_busy_s / (released * plant.drafters),
        put_wait_s=state.put_wait_s,
        take_wait_s=state.take_wait_s,
    )


def _one_batch(plant: Plant, state: _State, draw: random.Random, drafter_free: float) -> float:
    """Follows the next micro-batch through target, queue and drafter; when its drafter is done."""
    claimed = heapq.heappop(state.free)
    target_s = _time(plant.batch_tokens / plant.target_tok_s, plant.spread, draw)
    drafter_s = _time(plant.batch_tokens / plant.drafter_tok_s, plant.spread, draw)
    oldest = len(state.taken) - plant.queue_depth
    if oldest >= 0:
        state.room = max(state.room, state.taken[oldest])
    computed = claimed + target_s
    put = max(computed, state.room)
    taken = max(put, drafter_free)
    heapq.heappush(state.free, put)
    state.taken.append(taken)
    state.put_wait_s += put - computed
    state.take_wait_s += taken - drafter_free
    state.target_busy_s += target_s
    state.drafter_busy_s += drafter_s
    return taken + drafter_s


def _time(mean_s: float, spread: float, draw: random.Random) -> float:
    """A log-normal time of the given mean and relative spread."""
    if spread == 0:
        return mean_s
    sigma = math.sqrt(math.log1p(spread**2))
    return mean_s * math.exp(draw.gauss(-(sigma**2) / 2, sigma))


def best_split(plant: Plant, devices: int) -> Plant:
    """`plant` with `devices` devices divided so that most tokens come out; of equals the one with fewer drafters."""
    assert devices >= 2
    choices = [replace(plant, targets=devices - d, drafters=d) for d in range(1, devices)]
    return max(choices, key=lambda choice: (round(simulate(choice).tok_s, 3), -choice.drafters))


def ideal_tok_s(plant: Plant) -> float:
    """The slower side's own speed: what a pipeline without any wait would give."""
    return min(plant.targets * plant.target_tok_s, plant.drafters * plant.drafter_tok_s)
