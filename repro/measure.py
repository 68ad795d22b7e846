"""Runs one fault in child processes and says whether it did what the table expects."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from repro.child import Outcome, run_body
from repro.expected import Fault, expectation, release, under_strategy
from repro.rates import Rate

SHOWS_AS = {"shown", "hung", "crashed"}


@dataclass(frozen=True)
class Measurement:
    """What the trials of one fault gave; `wrong` says what contradicts the table, None when nothing does."""

    fault: str
    torch: str
    strategy: str | None
    expected: str
    verdicts: tuple[str, ...]
    lines: tuple[str, ...]
    seconds: float
    wrong: str | None

    @property
    def rate(self) -> Rate:
        """How often the fault showed, in any form."""
        return Rate(sum(verdict in SHOWS_AS for verdict in self.verdicts), len(self.verdicts))

    def as_json(self) -> dict[str, object]:
        low, high = self.rate.interval()
        return {**asdict(self), "shown": self.rate.shown, "trials": self.rate.trials, "interval": [low, high]}


def measure(entry: Fault, strategy: str | None = None, trials: int | None = None) -> Measurement:
    """Run the fault; under a strategy `under_strategy` says what is expected, without one the table."""
    expected = under_strategy(entry) if strategy is not None else expectation(entry, release())
    outcomes = [
        run_body(entry.body, entry.limit_s, strategy, environment=dict(entry.environment))
        for _ in range(trials or entry.trials)
    ]
    return Measurement(
        fault=entry.name,
        torch=torch.__version__,
        strategy=strategy,
        expected=expected,
        verdicts=tuple(outcome.verdict for outcome in outcomes),
        lines=tuple(outcome.line for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
        wrong=_wrong(expected, outcomes),
    )


def _wrong(expected: str, outcomes: list[Outcome]) -> str | None:
    allowed = {
        "shows": {"shown"},
        "absent": {"clean"},
        "crash": {"crashed"},
        "chance": {"shown", "clean", "crashed"},
    }[expected]
    for outcome in outcomes:
        if outcome.verdict not in allowed:
            detail = outcome.stacks or outcome.output
            return f"expected {expected}, got {outcome.verdict} (exit code {outcome.code}): {outcome.line}\n{detail}"
    return None
