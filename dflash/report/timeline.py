"""The compile time line: what probes.compile_trace wrote, one lane a thread, stages inside stages below each other."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.report.markup import Markup, joined, tag
from dflash.report.scale import axis, short

WIDTH, LEFT, LANE, GAP = 860, 150, 13, 12
# the longest intervals are drawn; a warm call of microseconds is no more than a hair on the picture
MOST_DRAWN = 2000
DEEPEST = 5


@dataclass(frozen=True)
class Interval:
    """A stage of one thread, in milliseconds since the recording began; depth: how many others it is inside."""

    thread: str
    kind: str
    name: str
    start_ms: float
    length_ms: float
    depth: int = 0

    @property
    def end_ms(self) -> float:
        """Where it ends."""
        return self.start_ms + self.length_ms


def find_traces(directory: Path) -> list[tuple[str, list[Interval]]]:
    """Names and intervals of every trace in a run's directory; files that are no trace are passed over."""
    found = []
    for path in sorted(directory.glob("*trace*.json")):
        intervals = read_trace(path)
        if intervals:
            found.append((path.name, intervals))
    return found


def read_trace(path: Path) -> list[Interval]:
    """The intervals of a Chrome trace-event file, nested by thread; none when it is not one, or not yet whole."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        named = {e["tid"]: str(e["args"]["name"]) for e in events if e.get("name") == "thread_name"}
        plain = [_interval(e, named) for e in events if e.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [each for thread in sorted({i.thread for i in plain}) for each in _nested(plain, thread)]


def _interval(event: dict[str, Any], named: dict[int, str]) -> Interval:
    thread = f"{named.get(event['tid'], 'thread')} ({event['tid']})"
    kind = str(event.get("cat", "other"))
    return Interval(thread, kind, str(event["name"]), float(event["ts"]) / 1e3, float(event["dur"]) / 1e3)


def _nested(plain: Sequence[Interval], thread: str) -> Iterator[Interval]:
    open_ends: list[float] = []
    for each in sorted((i for i in plain if i.thread == thread), key=lambda i: (i.start_ms, -i.length_ms)):
        while open_ends and open_ends[-1] <= each.start_ms:
            open_ends.pop()
        yield Interval(each.thread, each.kind, each.name, each.start_ms, each.length_ms, len(open_ends))
        open_ends.append(each.end_ms)


def timeline(title: str, intervals: Sequence[Interval]) -> Markup:
    """The picture, with the total of each kind as its legend."""
    kinds = sorted({i.kind for i in intervals}, key=lambda kind: -_total(intervals, kind))
    colour = {kind: f"k{min(number, 7)}" for number, kind in enumerate(kinds)}
    x = axis([i.start_ms for i in intervals] + [i.end_ms for i in intervals], LEFT, WIDTH - 8)
    tops, height = _lanes(intervals)
    parts = [_thread_name(thread, top) for thread, top in tops.items()]
    for each in sorted(intervals, key=lambda i: -i.length_ms)[:MOST_DRAWN]:
        if each.depth < DEEPEST:
            left, right = x.place(each.start_ms), x.place(each.end_ms)
            box = {"x": left, "y": tops[each.thread] + each.depth * LANE, "height": LANE - 1}
            hint = f"{each.name}\n{each.start_ms:.1f} ms + {each.length_ms:.1f} ms\n{each.thread}"
            look = {"width": max(0.8, right - left), "class": f"stage {colour[each.kind]}"}
            parts.append(tag("rect", {**box, **look}, tag("title", None, hint)))
    for value in x.ticks(8):
        parts.append(tag("text", {"x": x.place(value), "y": height - 5, "text-anchor": "middle"}, short(value)))
    frame = {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-label": title, "class": "wide"}
    legend = tag("p", {"class": "legend"}, *(_key(kind, colour[kind], intervals) for kind in kinds))
    unit = " ms since the recording began; a kind's total counts nested stages each"
    caption = tag("figcaption", None, title, tag("span", {"class": "unit"}, unit))
    return tag("figure", {"class": "full"}, caption, tag("div", {"class": "scroll"}, tag("svg", frame, *parts)), legend)


def _lanes(intervals: Sequence[Interval]) -> tuple[dict[str, int], int]:
    """Top of each thread's lane, and the height of the picture."""
    tops: dict[str, int] = {}
    at = 4
    for thread in dict.fromkeys(i.thread for i in sorted(intervals, key=lambda i: i.start_ms)):
        tops[thread] = at
        depth = min(DEEPEST, 1 + max(i.depth for i in intervals if i.thread == thread))
        at += depth * LANE + GAP
    return tops, at + 16


def _thread_name(thread: str, top: int) -> Markup:
    short_name = thread if len(thread) <= 22 else f"{thread[:10]}…{thread[-11:]}"
    return tag("text", {"x": 4, "y": top + LANE - 3}, tag("title", None, thread), short_name)


def _total(intervals: Sequence[Interval], kind: str) -> float:
    return sum(i.length_ms for i in intervals if i.kind == kind)


def _key(kind: str, colour: str, intervals: Sequence[Interval]) -> Markup:
    count = sum(i.kind == kind for i in intervals)
    words = f" {kind} x{count}, {_total(intervals, kind):.0f} ms"
    return tag("span", {"class": "key"}, tag("i", {"class": f"chip {colour}"}), joined([words]))
