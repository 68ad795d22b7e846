"""Recorded events as Chrome trace-event JSON, the format Perfetto opens: true process and thread ids, thread names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from probes.call_recorder import Event

# torch's own phase names, by the stage they belong to; the first that is a part of the name wins
_PHASES = (
    ("backward_compile", "lazy backward"),
    ("bw_compiler", "inductor"),
    ("aot", "AOT"),
    ("inductor", "inductor"),
    ("compile_fx", "inductor"),
    ("graph_lowering", "inductor"),
    ("graphlowering", "inductor"),
    ("scheduler", "inductor"),
    ("codecache", "inductor"),
    ("fxgraph", "inductor"),
    ("async_compile", "inductor"),
    ("triton", "inductor"),
    ("cpp", "inductor"),
)


def kind_of(event: Event) -> str | None:
    """What an interval is called on the time line; None for events that are no interval."""
    if event.kind == "call":
        return "cold call" if "compiles" in event.detail else "warm call"
    if event.kind == "phase":
        lowered = event.name.lower()
        return next((stage for part, stage in _PHASES if part in lowered), "dynamo phase")
    return {
        "compile": "dynamo",
        "trace": "FX trace",
        "lock wait": "wait for compile_lock",
        "annotate": "mask annotation",
    }.get(event.kind)


def write_trace(path: Path, events: Sequence[Event], start_ns: int) -> None:
    """Write all intervals, in order of time; microseconds since `start_ns`."""
    document = {"traceEvents": [*_names(events), *_intervals(events, start_ns)], "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document), encoding="utf-8")


def _names(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    pid = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": " ".join(sys.argv)[:200] or "python"}}
    for tid, name in sorted({(event.tid, event.thread) for event in events}):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _intervals(events: Sequence[Event], start_ns: int) -> Iterator[dict[str, Any]]:
    for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
        kind = kind_of(event)
        if kind is None:
            continue
        yield {
            "ph": "X",
            "name": f"{kind}: {event.name}",
            "cat": kind,
            "pid": os.getpid(),
            "tid": event.tid,
            "ts": (event.start_ns - start_ns) / 1000,
            "dur": max(event.end_ns - event.start_ns, 1) / 1000,
            "args": {key: str(value) for key, value in event.detail.items() if value},
        }
