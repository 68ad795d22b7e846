"""Pictures as inline SVG, coloured by the page's style so that they follow light and dark: lines and bars."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash.report.markup import Markup, joined, tag
from dflash.report.scale import Axis, Bucket, Point, axis, buckets, short

# units of the picture; a phone shows it at about 0.8 of that and a desk screen at 1.2, so text stays readable
WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34
DRAWN, HOVERED = 300, 60
COLOURS = 6
X_NAME = "step"


@dataclass(frozen=True)
class Series:
    """One curve: `colour` counts the runs of the page; dots: every point is marked."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Bars:
    """One bar a slot or name, of one run."""

    name: str
    values: Sequence[float]
    colour: int = 0


def line_chart(title: str, series: Sequence[Series], *, unit: str = "", note: str = "", keys: bool = False) -> Markup:
    """Curves over the steps; long ones as the mean of neighbours with a band from the lowest to the highest.

    keys: the curves are not the page's runs, so they are named below the picture.
    """
    kept = [s for s in series if buckets(s.points, 1)]
    if not kept:
        return _figure(title, unit, note, tag("p", {"class": "empty"}, "nothing logged yet"))
    x = axis([p[0] for s in kept for p in s.points], LEFT, WIDTH - RIGHT)
    y = axis([p[1] for s in kept for p in s.points], HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y), *(_curve(s, x, y) for s in kept), _hover(kept, x)]
    named = [legend([(s.name, s.colour) for s in kept])] if keys else []
    return _figure(title, unit, note, joined([_svg(title, parts), *named]))


def bar_chart(title: str, groups: Sequence[Bars], labels: Sequence[str], *, unit: str = "", note: str = "") -> Markup:
    """Groups of bars side by side, one group a label; values from zero."""
    kept = [group for group in groups if group.values]
    if not kept:
        return _figure(title, unit, note, tag("p", {"class": "empty"}, "nothing logged yet"))
    y = axis([value for group in kept for value in group.values], HEIGHT - BOTTOM, TOP, from_zero=True)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    parts = [_horizontal_grid(y), _bar_labels(labels, step)]
    width = 0.8 * step / len(kept)
    for number, group in enumerate(kept):
        for index, value in enumerate(group.values):
            left = LEFT + step * (index + 0.1) + width * number
            shape = {"x": left, "y": y.place(value), "width": width, "height": y.place(0) - y.place(value)}
            hint = tag("title", None, f"{group.name} {labels[index]}: {value:.3f}")
            parts.append(tag("rect", {**shape, "class": f"bar c{group.colour % COLOURS}"}, hint))
    return _figure(title, unit, note, _svg(title, parts))


def legend(names: Sequence[tuple[str, int]]) -> Markup:
    """Names beside their colours."""
    keys = (
        tag("span", {"class": "key"}, tag("i", {"class": f"chip c{colour % COLOURS}"}), f" {name}")
        for name, colour in names
    )
    return tag("p", {"class": "legend"}, *keys)


def _figure(title: str, unit: str, note: str, picture: Markup) -> Markup:
    caption = [title, tag("span", {"class": "unit"}, f" {unit}" if unit else "")]
    below = [tag("p", {"class": "note"}, note)] if note else []
    return tag("figure", None, tag("figcaption", None, *caption), picture, *below)


def _svg(title: str, parts: Sequence[Markup], width: int = WIDTH, height: int = HEIGHT) -> Markup:
    box = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": title}
    return tag("svg", box, *parts)


def _text(x: float, y: float, words: str, anchor: str = "middle") -> Markup:
    return tag("text", {"x": x, "y": y, "text-anchor": anchor}, words)


def _grid(x: Axis, y: Axis) -> Markup:
    marks = [_text(x.place(value), HEIGHT - BOTTOM + 14, short(value)) for value in x.ticks(5)]
    return joined([_horizontal_grid(y), *marks, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, X_NAME)])


def _horizontal_grid(y: Axis) -> Markup:
    parts = []
    for value in y.ticks(4):
        at = y.place(value)
        parts.append(tag("line", {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": at, "y2": at, "class": "grid"}))
        parts.append(_text(LEFT - 5, at + 4, short(value), "end"))
    return joined(parts)


def _bar_labels(labels: Sequence[str], step: float) -> Markup:
    """Every label, or every second, third... so that they do not run into each other."""
    every = max(1, -(-len(labels) // 16))
    chosen = [(i, label) for i, label in enumerate(labels) if i % every == 0]
    return joined(_text(LEFT + step * (i + 0.5), HEIGHT - BOTTOM + 14, label) for i, label in chosen)


def _curve(series: Series, x: Axis, y: Axis) -> Markup:
    thin, colour = buckets(series.points, DRAWN), f"c{series.colour % COLOURS}"
    parts = []
    if len(thin) < len(series.points):
        parts.append(tag("polygon", {"points": _band(thin, x, y), "class": f"band {colour}"}))
    line = " ".join(f"{x.place(b.x):.1f},{y.place(b.mean):.1f}" for b in thin)
    parts.append(tag("polyline", {"points": line, "class": f"curve {colour}"}))
    if series.dots or len(thin) == 1:
        dot = {"r": 3.5, "class": f"bar {colour}"}
        parts += [tag("circle", {"cx": x.place(b.x), "cy": y.place(b.mean), **dot}) for b in thin]
    return joined(parts)


def _band(thin: Sequence[Bucket], x: Axis, y: Axis) -> str:
    upper = [f"{x.place(b.x):.1f},{y.place(b.high):.1f}" for b in thin]
    lower = [f"{x.place(b.x):.1f},{y.place(b.low):.1f}" for b in reversed(thin)]
    return " ".join(upper + lower)


def _hover(series: Sequence[Series], x: Axis) -> Markup:
    """Invisible columns whose title names the values below the pointer: a browser shows it without any script."""
    columns: dict[int, list[str]] = {}
    width = (WIDTH - LEFT - RIGHT) / HOVERED
    for each in series:
        for bucket in buckets(each.points, HOVERED):
            words = f"{X_NAME} {bucket.x:.0f}  {each.name}: {bucket.mean:.4g}"
            columns.setdefault(int((x.place(bucket.x) - LEFT) / width), []).append(words)
    box = {"y": TOP, "width": width, "height": HEIGHT - TOP - BOTTOM, "class": "hover"}
    return joined(
        tag("rect", {"x": LEFT + number * width, **box}, tag("title", None, "\n".join(words)))
        for number, words in sorted(columns.items())
    )
