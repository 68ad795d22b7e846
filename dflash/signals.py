"""Turns SIGINT and SIGTERM into a flag that the loop reads; a second one stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked for a stop, if one did."""

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def __bool__(self) -> bool:
        """True once a signal has come."""
        return self.signal_number is not None


class EvaluationAbandoned(Exception):
    """Raised inside a long evaluation when a stop was asked for; the loop then writes its checkpoint."""


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Installs the handlers (per process, main thread only) and restores the earlier ones on exit."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        # whoever asks twice does not want to wait for the checkpoint
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
