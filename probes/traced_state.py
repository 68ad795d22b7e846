"""Which process-wide torch state changed while threads traced and compiled, sampled where something begins or ends.

A change is credited to the interval that was open in the thread that saw it first; others open then are named too.
Only plain Python state is read: reading a generator makes a tensor, which a trace in progress would record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from probes import torch_internals
from probes.call_recorder import Event

_READERS: dict[str, Callable[[], object]] = {
    "FX flag": torch_internals.fx_flag,
    "FX patcher": lambda: torch_internals.current_patcher() is not None,
    "nn.Module.__call__ patched": lambda: not torch_internals.module_call_is_original(),
    "nn.Module.__getattr__ patched": lambda: not torch_internals.module_getattr_is_original(),
    "is_compiling": torch_internals.compiling_flag,
    "is_exporting": torch_internals.exporting_flag,
    "stance": torch_internals.stance,
    "annotation": lambda: "fallback_to_eager" in str(torch_internals.current_meta().get("custom", "")),
    "default dtype": lambda: str(torch.get_default_dtype()),
}
_BEGINS = {"begin trace": "trace", "begin compile": "compile"}


@dataclass(frozen=True)
class StateChange:
    """One kind of change: what, from and to, seen inside which thread's interval, with whom open beside it."""

    name: str
    before: str
    after: str
    thread: str
    inside: str
    beside: tuple[str, ...]
    first_ms: float
    count: int

    def __str__(self) -> str:
        beside = f", while {', '.join(self.beside)}" if self.beside else ""
        return (
            f"{self.name} {self.before} -> {self.after}, seen in {self.thread}'s {self.inside} "
            f"at {self.first_ms:.1f} ms{beside}" + (f" ({self.count} times)" if self.count > 1 else "")
        )


class StateWatch:
    """Compares the state with what it was at the last sample, in whichever thread that was."""

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._lock = threading.Lock()
        self._last = {name: read() for name, read in _READERS.items()}
        self._open: dict[str, list[str]] = {}  # thread -> what it is inside
        self._changes: dict[tuple[str, str, str, str, str, tuple[str, ...]], tuple[float, int]] = {}

    def sample(self, event: Event) -> None:
        """Note what changed since the last sample; called in the event's thread."""
        with self._lock:
            stack = self._open.setdefault(event.thread, [])
            if event.name in _BEGINS and event.kind == "mark":
                stack.append(_BEGINS[event.name])
            self._compare(event, stack)
            if event.kind in _BEGINS.values() and stack:
                stack.pop()

    def _compare(self, event: Event, stack: list[str]) -> None:
        inside = stack[-1] if stack else event.kind
        beside = tuple(f"{thread} is in a {s[-1]}" for thread, s in self._open.items() if s and thread != event.thread)
        for name, read in _READERS.items():
            now = read()
            if now == self._last[name]:
                continue
            key = (name, str(self._last[name]), str(now), event.thread, inside, beside)
            first_ms, count = self._changes.get(key, ((event.end_ns - self._start_ns) / 1e6, 0))
            self._changes[key] = (first_ms, count + 1)
            self._last[name] = now

    def changes(self) -> tuple[StateChange, ...]:
        """All kinds of change seen, in order of their first time."""
        with self._lock:
            found = [StateChange(*key, first, count) for key, (first, count) in self._changes.items()]
        return tuple(sorted(found, key=lambda change: change.first_ms))
