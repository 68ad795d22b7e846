"""From numbers to places on a picture: ticks at round values, ranges, long series thinned to what a screen shows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """A range of values [low, high] laid over pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values inside the range."""
        step = _round_step((self.high - self.low) / max(1, count))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Bucket:
    """Neighbouring points of a series as one: mean x, and mean, lowest and highest y."""

    x: float
    mean: float
    low: float
    high: float


def axis(values: Iterable[float], start: float, end: float, *, from_zero: bool = False) -> Axis:
    """An axis that holds all finite values with a little air; a single value gets a range of its own."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    air = 0.05 * (high - low)
    return Axis(low if from_zero and low == 0 else low - air, high + air, start, end)


def buckets(points: Sequence[Point], count: int) -> list[Bucket]:
    """At most `count` buckets of equally many points, in order; points that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    size = max(1, math.ceil(len(finite) / count))
    made = []
    for start in range(0, len(finite), size):
        xs, ys = zip(*finite[start : start + size], strict=True)
        made.append(Bucket(sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return made


def short(value: float) -> str:
    """A number in as few characters as a tick has room for: 0.0006, 12.5, 3.2k, 1.5M."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.2g}" if 0 < size < 1e-3 else f"{value:.4g}"


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return float(next((m * power for m in (1, 2, 5) if m * power >= rough * 0.999), 10 * power))
