"""Strategy locked-compile: cold steps alone in the process, warm steps side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, cast

from dflash.attention.base import Fn, Role
from dflash.attention.cold_steps import GatedStrategy
from dflash.attention.compile_watch import watched_compiles
from dflash.attention.one_entry import compiled
from probes.torch_internals import compile_lock


class LockedCompile(GatedStrategy):
    """Compiles with inductor; the first step of every key (forward and backward) excludes every other step.

    A step is warm once its scope ended without an error. A compiled function called outside any step excludes others
    for the call only: its backward is then not covered and may deadlock, so a trainer must use `step_scope`. Traces,
    mask builds and compiles of code that takes no step are not held back: `isolated` is for those.
    """

    name = "locked-compile"
    leaves_open = "traces, compiles and mask builds of code that takes no step"

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function behind the gate."""
        return cast(Fn, self._behind_gate(compiled(fn), fn))

    def _behind_gate(self, inner: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
        gate, lock = self._steps.gate, compile_lock()

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            # a thread that compiles or traces must not wait for a step that waits for compile_lock
            inside = gate.held() or lock._is_owned()
            with nullcontext() if inside else gate.exclusive("call outside any step"):
                return inner(*args, **kwargs)

        return call

    def thread_scope(self) -> AbstractContextManager[None]:
        """Watches compiles while any thread is inside, so that late ones are seen; nothing is set per thread."""
        return watched_compiles()
