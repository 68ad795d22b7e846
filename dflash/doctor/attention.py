"""Checks of the attention strategy: what is chosen and why, and which races this torch leaves open to it."""

from collections.abc import Iterator

import torch

from dflash.doctor.base import Check, Subject, passed, warned

# strategies whose own steps other threads' traces and compiles reach; measured in repro/
OPEN_TO_RACES = frozenset({"force-compile"})


def checks(subject: Subject) -> Iterator[Check]:
    """The choice with its reason, then what it means on this torch."""
    backend = subject.attention
    yield passed("strategy", str(backend))
    name = backend.strategy.name
    left = backend.strategy.leaves_open
    if name in OPEN_TO_RACES:
        yield warned("races", f"{name} leaves open: {left}", "use isolated, locked-compile or sdpa")
    elif name == "eager" and backend.kernel == "flex":
        yield warned(
            "races", "uncompiled flex traces on every call, for all threads to see", "use locked-compile or sdpa"
        )
    else:
        beyond = f"; not prevented: {left}" if left and name != "eager" else ""
        yield passed("races", f"none reaches the steps of {name} on torch {torch.__version__}{beyond}")
