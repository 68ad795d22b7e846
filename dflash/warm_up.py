"""Warm-up: every width of row that a run trains on is compiled before the run, in one thread, forward and backward."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from dflash.attention.base import Strategy
from dflash.attention.cold_steps import LateCompile
from dflash.attention.isolated import Isolated
from dflash.attention.locked import LockedCompile
from dflash.data.rows import Batch, batches
from dflash.step import Stepper

# widths that `data.rows.batches` gives: one when packed, else row_tokens, half and a quarter of it
WIDTHS_PACKED, WIDTHS_UNPACKED = 1, 3
# micro-batches that are looked through for a width that may not occur at all
LOOKED_THROUGH = 500


@dataclass(frozen=True)
class WarmUp:
    """What was compiled: widths of rows in tokens, and the time it took."""

    widths: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"compiled rows of {', '.join(map(str, self.widths))} tokens in {self.seconds:.1f} s"


def warm_up(stepper: Stepper, progress: Callable[[int, int], None] | None = None) -> WarmUp | None:
    """Runs forward and backward once for the first batch of each width; weights and optimizer stay as they are.

    Call it in the strategy's thread_scope, before other threads start. None: the strategy compiles nothing.
    """
    if not _compiles(stepper.parts.attention.strategy):
        return None
    began_s = time.perf_counter()
    expected = WIDTHS_PACKED if stepper.config.data.pack else WIDTHS_UNPACKED
    done: list[int] = []
    for batch in _one_of_each_width(stepper, expected):
        if progress is not None:
            progress(len(done), expected)
        stepper.forward_backward(batch, stepper.source.rows(batch), stepper.anchors(batch))
        stepper.parts.optimizer.zero_grad(set_to_none=True)
        done.append(batch.input_ids.shape[1])
    return WarmUp(tuple(done), time.perf_counter() - began_s)


def _compiles(strategy: Strategy) -> bool:
    return strategy.name not in ("eager", "sdpa")


def _one_of_each_width(stepper: Stepper, expected: int) -> Iterator[Batch]:
    """Real batches, so that everything dynamo guards on is what the run will have."""
    seen: set[int] = set()
    stream = batches(stepper.parts.store, stepper.config.data, stepper.config.seed, epochs=1)
    for batch in islice(stream, LOOKED_THROUGH):
        width = batch.input_ids.shape[1]
        if width not in seen and bool(stepper.anchors(batch).valid.any()):
            seen.add(width)
            yield batch
        if len(seen) == expected:
            return


def late_compiles(strategy: Strategy) -> tuple[LateCompile, ...]:
    """Compiles that the warm-up and the steps' keys did not foretell; none from strategies that do not watch."""
    return strategy.late_compiles if isinstance(strategy, LockedCompile | Isolated) else ()
