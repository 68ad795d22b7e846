"""`--watchdog S`: when nothing moves for S seconds, the stacks are judged and written; the run ends with code 3."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console

from dflash.errors import Hung
from probes import stack_sources
from probes.stacks import StacksResult, analyse, render

# seconds the main thread has to end the run in good order, once it is told to
GRACE_S = 8.0
# a compile that nothing blocks is work, not a hang: so many further windows are allowed for it
COMPILE_WINDOWS = 10


class Watchdog:
    """A thread that expects `beat` at least every `limit_s` seconds; 0: never started.

    On silence it writes the stacks and their verdict to `report` and calls `stop(Hung)`. When the block has still not
    ended `grace_s` seconds later (the main thread itself is stuck) it ends the process by `end(3)`.
    """

    def __init__(
        self,
        limit_s: float,
        report: Path,
        stop: Callable[[Hung], None],
        grace_s: float = GRACE_S,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.limit_s, self.report = limit_s, report
        self._stop, self._grace_s, self._end = stop, grace_s, end
        self._left = threading.Event()
        self._last_s = time.monotonic()
        self._what, self._asleep = "start", False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, what: str) -> None:
        """Something has moved: `what` it was is named when nothing follows."""
        self._last_s, self._what = time.monotonic(), what

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """A time in which nothing is expected here, because another process works."""
        self._asleep = True
        try:
            yield
        finally:
            self._asleep = False
            self.beat("awake")

    def __enter__(self) -> "Watchdog":
        if self.limit_s > 0:
            self._last_s = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        windows = 0
        while not self._left.wait(max(0.01, self._last_s + self.limit_s * (1 + windows) - time.monotonic())):
            silent_s = time.monotonic() - self._last_s
            if self._asleep:
                self._last_s = time.monotonic()
                continue
            if silent_s < self.limit_s * (1 + windows):
                windows = int(silent_s // self.limit_s)
                continue
            result = self._look()
            if result is None:
                return
            if _only_compiles(result) and windows < COMPILE_WINDOWS:
                windows += 1
                continue
            self._give_up(result, silent_s)
            return

    def _look(self) -> StacksResult | None:
        """The verdict over a second of stacks; none when the run ended meanwhile."""
        dumps = stack_sources.sample(stack_sources.own_dump, window_s=1.0, pause=self._left.wait)
        return None if self._left.is_set() else analyse(dumps)

    def _give_up(self, result: StacksResult, silent_s: float) -> None:
        verdict = "; ".join(f"{found.kind}: {found.text}" for found in result.verdicts)
        hung = Hung(f"nothing moved for {silent_s:.0f} s after {self._what!r} ({verdict}); stacks in {self.report}")
        with self.report.open("w", encoding="utf-8") as stream:
            stream.write(f"{hung}\n\n")
            render(result, Console(file=stream, width=160))
        self._stop(hung)
        if not self._left.wait(self._grace_s):
            print(f"dflash: {hung}", file=sys.stderr, flush=True)
            self._end(Hung.exit_code)


def _only_compiles(result: StacksResult) -> bool:
    return all(verdict.kind == "long compile" for verdict in result.verdicts)
