"""The seam between what is computed (kernels) and how it is made safe to compile in threads (strategies)."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

Role = Literal["attention", "layer", "mask", "loss"]
Fn = TypeVar("Fn", bound=Callable[..., Any])


class Strategy(Protocol):
    """How compiled functions are built and called when several threads do so in one process."""

    name: str

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns `fn` as this strategy runs it. Called once, while the drafter is built, never in a step."""
        ...

    def thread_scope(self) -> AbstractContextManager[None]:
        """Entered once by every thread that will call compiled functions."""
        ...

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Round forward AND backward of one step. `key`: all that dynamo guards on (shapes, dtypes, device, grad mode)."""
        ...
