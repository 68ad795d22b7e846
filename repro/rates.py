"""k of n with a Wilson score interval: what a handful of trials says about a rate, and what it does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Rate:
    """`shown` of `trials`; the interval holds the true rate with 95 % confidence (Wilson 1927, doi 10.2307/2276774)."""

    shown: int
    trials: int

    def interval(self) -> tuple[float, float]:
        """Lower and upper bound, 0 to 1; (0, 1) without trials."""
        if self.trials == 0:
            return 0.0, 1.0
        n, p, z2 = self.trials, self.shown / self.trials, _Z95**2
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.shown} of {self.trials} ({low:.0%} to {high:.0%})"
