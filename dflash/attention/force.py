"""Strategy force-compile: torch's own switch that skips the nested-trace check, set in the calling thread."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch

from dflash.attention.base import Fn, Role
from dflash.errors import StrategyError
from probes.torch_internals import config_is_per_context, dynamo_config

FLAG = "force_compile_during_fx_trace"


class ForceCompile:
    """Keeps the compiled kernel while another thread traces; leaves module patches, RNG and the deadlock open."""

    name = "force-compile"

    def __init__(self) -> None:
        if not hasattr(dynamo_config(), FLAG):
            raise StrategyError(f"torch with dynamo's {FLAG} (2.11 to 2.15)", torch.__version__, "use locked-compile")

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function."""
        return cast(Fn, torch.compile(fn, dynamic=False))

    def thread_scope(self) -> AbstractContextManager[None]:
        """Sets the flag for this thread (torch >= 2.12), or for the process while any thread is inside (2.11)."""
        return forced()

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Nothing to hold: steps run side by side, cold or warm."""
        return nullcontext()


class _Holders:
    """Counts threads inside `forced`: in torch 2.11 the flag is one for the process; the last one out restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before = False


_HOLDERS = _Holders()


@contextmanager
def forced() -> Iterator[None]:
    """Sets dynamo's flag and restores it; per thread from torch 2.12, counted per process in 2.11."""
    config = dynamo_config()
    with _HOLDERS.lock:
        before = getattr(config, FLAG)
        if _HOLDERS.count == 0:
            _HOLDERS.before = before
        _HOLDERS.count += 1
        setattr(config, FLAG, True)
    try:
        yield
    finally:
        with _HOLDERS.lock:
            _HOLDERS.count -= 1
            if config_is_per_context():
                setattr(config, FLAG, before)
            elif _HOLDERS.count == 0:
                setattr(config, FLAG, _HOLDERS.before)
