"""The range of every number a user can give, by option name; one table for all verbs."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from dflash.errors import ConfigError

# what is counted and kept in 64 bits, and shapes beyond what any machine holds: a slip of the keyboard, said at once
COUNT, SHAPE = (1, 10**12), (1, 1 << 20)
COUNT_OR_NONE, SIZE = (0, 10**12), (1, 1 << 24)
SEED = (-(2**63), 2**63 - 1)
LAYERS = (1, 1024)
LARGEST = 3.0e38  # float32
RANGES: dict[str, tuple[float, float]] = {
    "steps": COUNT,
    "seed": SEED,
    "queue-depth": SHAPE,
    "restarts": COUNT_OR_NONE,
    "watchdog": (0, 1e8),
    "save-every": COUNT_OR_NONE,
    "keep": COUNT,
    "drafter.layers": LAYERS,
    "drafter.features": LAYERS,
    "drafter.block-size": (2, 1 << 16),
    "drafter.max-anchors": SHAPE,
    "drafter.sliding-window": SIZE,
    "data.row-tokens": SIZE,
    "data.batch-rows": SHAPE,
    "objective.gamma": (1e-6, math.inf),
    "optim.lr": (1e-30, 1e6),
    "optim.weight-decay": (0, 1e6),
    "optim.warmup": (0, 1),
    "optim.clip": (1e-30, math.inf),
    "optim.accumulate": (0, 1 << 20),
    "optim.epochs": (1, 10**6),
    "optim.max-nonfinite": COUNT,
    "eval.every": COUNT_OR_NONE,
    "eval.prompts": COUNT,
    "eval.max-new-tokens": COUNT,
    "max-new-tokens": COUNT,
    "temperature": (0, 1e6),
    "warmup": COUNT_OR_NONE,
    "row-tokens": (2, 1 << 24),
    "preview": COUNT_OR_NONE,
}
# options of one name and two meanings: zero is everything for EvaluateConfig, and not a number of rows to read
RANGES_OF: dict[str, dict[str, tuple[float, float]]] = {
    "EvaluateConfig": {"limit": COUNT_OR_NONE},
    "PrepareOptions": {"limit": COUNT},
}


def check_ranges(options: Any) -> None:
    """ConfigError for the first number of an options dataclass that is not finite or not in its range."""
    own = RANGES_OF.get(type(options).__name__, {})
    for name, value in _numbers(options):
        low, high = own.get(name, RANGES.get(name, SEED if isinstance(value, int) else (-LARGEST, LARGEST)))
        if not low <= value <= high:
            raise ConfigError(_words(low, high, value), _short(value), "change the value", where=f"--{name}")


def _words(low: float, high: float, value: float) -> str:
    kind = "a whole number" if isinstance(value, int) else "a number"
    if (low, high) == (0, 1):
        return "a share between 0 and 1"
    limit, side = (high, "most") if value > high else (low, "least")
    return f"{kind} of at {side} {_plain(limit)}"


def _plain(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _short(value: float) -> str:
    """Thousands of digits help nobody (and Python does not print them)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "one of more than 38 digits"
    return str(value)


def _numbers(node: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for item in fields(node):
        name, value = prefix + item.name.replace("_", "-"), getattr(node, item.name)
        if is_dataclass(value):
            # the options of a run have no prefix of their own on the command line
            yield from _numbers(value, prefix if type(value).__name__ == "TrainConfig" else f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
