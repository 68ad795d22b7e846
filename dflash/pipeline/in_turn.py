"""The steps of a run, computed by one thread: features, then the drafter, micro-batch after micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from dflash.data.rows import Batch
from dflash.pipeline.engine import Flow
from dflash.pipeline.placement import Layout
from dflash.step import Stepper, StepResult


class InTurn:
    """What Pipeline does, without threads."""

    def __init__(self, stepper: Stepper, layout: Layout) -> None:
        """`stepper` computes this rank's micro-batches of each step."""
        self.steppers = [stepper]
        self._layout = layout
        self._failure: BaseException | None = None
        self._stream: Iterator[Batch] = iter(())

    @contextmanager
    def running(self, stream: Iterator[Batch], first: int, total: int) -> Iterator[None]:
        """`stream` begins with the first micro-batch of step `first`."""
        self._stream = stream
        yield

    def step(self, number: int) -> StepResult:
        """Optimizer step `number`."""
        self.check()
        return self.steppers[0].step(number, list(islice(self._stream, len(self._layout.own))))

    def check(self) -> None:
        """Raises what `fail` was given."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error` at the next step."""
        self._failure = error

    def flow(self) -> Flow | None:
        """Nothing flows."""
        return None
