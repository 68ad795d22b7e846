"""Turns SIGINT, SIGTERM and SIGHUP into a flag that the loop reads; a second one stops at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    """Installs the handlers (per process) and restores the earlier ones on exit; in other threads than the main one,
    where Python lets nobody install any, signals stay the caller's own.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal_number = number
        # whoever asks twice does not want to wait for the checkpoint
        signal.signal(number, signal.SIG_DFL)

    # nohup has said that a closed terminal is no reason to stop
    asked = [n for n in SIGNALS if not (n == signal.SIGHUP and signal.getsignal(n) == signal.SIG_IGN)]
    before = {number: signal.signal(number, handle) for number in asked}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
