"""Checks of the attention strategy: what is chosen and why, and which races this torch leaves open to it."""

from collections.abc import Iterator

import torch

from dflash.doctor.base import Check, Subject, passed, warned

# strategies that compile without keeping other threads' traces away; measured in repro/
OPEN_TO_RACES = frozenset({"force-compile"})


def checks(subject: Subject) -> Iterator[Check]:
    """The choice with its reason, then what it means on this torch."""
    backend = subject.attention
    yield passed("strategy", str(backend))
    name = backend.strategy.name
    if name in OPEN_TO_RACES:
        yield warned(
            "races", f"{name} gets past the FX check and leaves the other races open", "use locked-compile or sdpa"
        )
    elif name == "eager" and backend.kernel == "flex":
        yield warned(
            "races", "uncompiled flex traces on every call, for all threads to see", "use locked-compile or sdpa"
        )
    else:
        yield passed("races", f"none reaches {name} on torch {torch.__version__}")
