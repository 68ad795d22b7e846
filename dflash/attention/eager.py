"""Strategy eager: the kernel as it is, uncompiled."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

from dflash.attention.base import Fn, Role


class Eager:
    """Right values, nothing compiled. Uncompiled flex with grad traces on every call, one thread only."""

    name = "eager"
    leaves_open = "with kernel flex and gradients every call is a trace, which disturbs whatever other threads do"

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns `fn` itself."""
        return fn

    def thread_scope(self) -> AbstractContextManager[None]:
        """Nothing to set."""
        return nullcontext()

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Nothing to hold."""
        return nullcontext()
