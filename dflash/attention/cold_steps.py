"""Which steps may compile: those whose key never came before run alone, all others side by side."""

import logging
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from dflash.attention.gate import PROCESS_GATE, Gate, Hold

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LateCompile:
    """A compile inside a step whose key was warm: in which thread, for which key, and why, in torch's words."""

    thread: str
    key: Hashable
    reason: str


class ColdSteps:
    """Steps of a key are cold until one ended without an error, and cold again after a compile beside other steps.

    cold: steps that ran alone; late: compiles that a warm key did not foretell (a key that leaves out something dynamo
    guards on, or a changed global setting), for the run's report.
    """

    def __init__(self, gate: Gate = PROCESS_GATE) -> None:
        self.gate = gate
        self.cold = 0
        self.late: list[LateCompile] = []
        self._warm: set[Hashable] = set()
        self._lock = threading.Lock()

    @contextmanager
    def step(self, key: Hashable) -> Iterator[None]:
        """Round forward and backward. Holds the gate: alone while `key` is cold, else shared. Errors: GateTimeout."""
        if key in self._warm:
            with self.gate.shared("warm step") as hold:
                if key in self._warm:
                    yield from self._warm_step(key, hold)
                    return
        # cold, or made cold while this thread waited for the gate
        with self.gate.exclusive("cold step"):
            yield
            with self._lock:
                self.cold += 1
                self._warm.add(key)

    def _warm_step(self, key: Hashable, hold: Hold) -> Iterator[None]:
        seen = len(hold.compiles)
        try:
            yield
        finally:
            # an exclusive hold round this step foresaw a compile
            if len(hold.compiles) > seen and not hold.exclusive:
                self._late(key, hold.thread, hold.compiles[seen:])

    def _late(self, key: Hashable, thread: str, reasons: list[str]) -> None:
        with self._lock:
            self._warm.discard(key)
            self.late += [LateCompile(thread, key, reason) for reason in reasons]
        for reason in reasons:
            LOG.warning("compiled beside other threads' steps (%s): %s; the next such step runs alone", thread, reason)


class GatedStrategy:
    """What the strategies that gate cold steps share; each adds how it compiles and what a thread enters."""

    def __init__(self, gate: Gate = PROCESS_GATE) -> None:
        """`gate`: the process's own, unless a test wants one for itself."""
        self._steps = ColdSteps(gate)

    @property
    def cold_steps(self) -> int:
        """Steps that ran alone."""
        return self._steps.cold

    @property
    def late_compiles(self) -> tuple[LateCompile, ...]:
        """Compiles beside other steps: none, when the keys tell all that dynamo guards on."""
        return tuple(self._steps.late)

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Exclusive while `key` is cold, shared afterwards. Holds process-wide state. Errors: GateTimeout."""
        return self._steps.step(key)
