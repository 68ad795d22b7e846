"""What each fault must do on each torch release: the table that the tests enforce and the matrix prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Release = tuple[int, int]
# shows: every trial must show it. absent: no trial may. crash: the process must die. chance: only the rate is recorded
Expect = Literal["shows", "absent", "crash", "chance"]
RELEASES: tuple[Release, ...] = ((2, 11), (2, 13), (2, 14))


@dataclass(frozen=True)
class Fault:
    """One fault of the list. `expected` follows RELEASES; `about` says what a strategy would have to protect."""

    name: str
    body: str
    expected: tuple[Expect, Expect, Expect]
    about: Literal["compiled steps", "traces", "masks", "export", "settings", "platform"]
    trials: int = 1
    limit_s: float = 200.0
    needs: Literal["nothing", "cuda", "cuda build without gpu"] = "nothing"
    environment: tuple[tuple[str, str], ...] = ()


FAULTS: tuple[Fault, ...] = (
    Fault("FXFLAG", "fx_flag", ("shows", "shows", "absent"), "compiled steps"),
    Fault("FXFLAG-PROCESSES", "fx_flag_processes", ("absent", "absent", "absent"), "compiled steps"),
    Fault("AOTWINDOW", "aot_window", ("shows", "absent", "absent"), "compiled steps"),
    Fault("FXSTUCK-A", "fx_stuck_a", ("shows", "shows", "shows"), "traces"),
    Fault("FXSTUCK-B", "fx_stuck_b", ("shows", "shows", "absent"), "traces"),
    Fault("GRAPHCORRUPT", "graph_corrupt", ("shows", "shows", "shows"), "traces"),
    Fault("PATCHREVERT", "patch_revert", ("shows", "shows", "shows"), "compiled steps"),
    Fault("EAGERFLEX", "eager_flex", ("shows", "shows", "shows"), "traces"),
    Fault("EAGERFLEX-VICTIM", "eager_flex_victim", ("shows", "shows", "absent"), "compiled steps"),
    Fault("EXPORTxCOMPILE", "export_compile", ("shows", "shows", "shows"), "export"),
    Fault("EXPORTNOOP", "export_noop", ("shows", "shows", "shows"), "export"),
    Fault("RNGREWIND", "rng_rewind", ("shows", "shows", "shows"), "settings"),
    Fault("DTYPEREVERT", "dtype_revert", ("shows", "shows", "shows"), "settings"),
    Fault("STANCE", "stance", ("shows", "shows", "shows"), "settings"),
    Fault("ISCOMPILING", "is_compiling", ("absent", "shows", "shows"), "settings"),
    Fault("CONFIGCTX", "config_ctx", ("absent", "shows", "shows"), "settings"),
    Fault("SETRNG", "set_rng", ("shows", "shows", "shows"), "settings"),
    Fault("ANNOTATE-A", "annotate_keyerror", ("absent", "shows", "shows"), "masks"),
    Fault("ANNOTATE-B", "annotate_degrade", ("absent", "shows", "shows"), "compiled steps"),
    Fault("ANNOTATE-C", "annotate_lowering", ("absent", "shows", "shows"), "compiled steps"),
    Fault("ANNOTATE-D", "annotate_stuck", ("absent", "shows", "shows"), "masks"),
    Fault("CACHEPOISON", "cache_poison", ("absent", "shows", "shows"), "compiled steps", limit_s=280.0),
    Fault("FLEXCOLD", "flex_cold", ("chance", "chance", "chance"), "compiled steps", limit_s=280.0),
    Fault("SEGV211", "segv_211", ("crash", "absent", "absent"), "platform", needs="cuda build without gpu"),
    Fault("DEADLOCK-MODEL", "deadlock_model", ("shows", "shows", "shows"), "compiled steps"),
    Fault("DEADLOCK", "deadlock", ("shows", "chance", "chance"), "compiled steps", limit_s=120.0, needs="cuda"),
    Fault("CASE", "case", ("shows", "absent", "absent"), "compiled steps", trials=2),
)


def fault(name: str) -> Fault:
    """The fault of that name; KeyError names the known ones."""
    known = {entry.name: entry for entry in FAULTS}
    if name not in known:
        raise KeyError(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def release() -> Release:
    """Major and minor of the installed torch."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return major, minor


def expectation(entry: Fault, on: Release) -> Expect:
    """What must happen on a release; one between or past the listed ones takes the newest listed one before it."""
    known = [index for index, listed in enumerate(RELEASES) if listed <= on]
    assert known, f"expected torch {RELEASES[0]} or newer, got {on}"
    return entry.expected[known[-1]]


def under_strategy(entry: Fault) -> Expect:
    """Under a strategy a fault of compiled steps, traces or masks must be absent; others are only recorded."""
    return "absent" if entry.about in ("compiled steps", "traces", "masks") else "chance"


def missing(entry: Fault) -> str | None:
    """Why this fault cannot be run here; None when it can."""
    if entry.needs == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if entry.needs == "cuda build without gpu" and (torch.version.cuda is None or torch.cuda.is_available()):
        return "needs a CUDA build of torch on a machine without a GPU"
    return None
