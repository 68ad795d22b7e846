"""torch.compile with nothing round it: what the strategies are measured against, and no strategy itself."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from dflash.attention.base import Fn, Role


class Unguarded:
    """Compiled, unprotected: right and fast in one thread, open to every race in several. For measurements only."""

    name = "unguarded"
    leaves_open = "everything"

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function."""
        return cast(Fn, torch.compile(fn, dynamic=False))

    def thread_scope(self) -> AbstractContextManager[None]:
        """Nothing is set."""
        return nullcontext()

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Nothing is held."""
        return nullcontext()
