"""Strategy isolated: tracing and compiling touch the thread that does it and no other."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import cast

import torch

from dflash.attention.base import Fn, Role
from dflash.attention.isolated_owner import Owner
from dflash.attention.isolated_patches import patches
from dflash.attention.locked import PROCESS_GATE, Gate, LockedCompile
from dflash.errors import StrategyError
from probes.torch_internals import (
    compile_lock,
    config_is_per_context,
    current_patcher,
    functorch_config,
    resolve,
)

# releases on which the race suite was run with it and without it
PROVED_ON = ((2, 11), (2, 13), (2, 14))


class _Installation:
    """Counts the scopes of all threads: the first one patches torch, the last one restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scopes = 0
        self.stack = ExitStack()

    def enter(self) -> None:
        with self.lock:
            if self.scopes == 0:
                self._install()
            self.scopes += 1

    def leave(self) -> None:
        with self.lock:
            self.scopes -= 1
            if self.scopes == 0:
                # a trace that still runs under the patches ends first
                with compile_lock():
                    self.stack.close()

    def _install(self) -> None:
        with compile_lock():
            if current_patcher() is not None:
                raise StrategyError("no trace in progress", "one in this process", "enter isolated_tracing() earlier")
            with ExitStack() as stack:
                for patch in patches(Owner()):
                    stack.enter_context(patch)
                self.stack = stack.pop_all()


_INSTALLATION = _Installation()


@contextmanager
def isolated_tracing() -> Iterator[None]:
    """Makes torch.fx tracing, torch.export and torch.compile safe beside each other and beside other threads' calls.

    Inside, one thread at a time traces, exports or compiles (they wait for dynamo's own lock; compiled and eager calls
    do not), and what it sets for the process - the FX flag, is_compiling, the wrappers of nn.Module, annotations - is
    seen by that thread alone. Patches torch for the process, from the first scope to enter until the last to leave, of
    whatever threads; enter it before threads start. Left open: RNG, default dtype and deterministic flags that another
    thread changes during a compile are reset at its end, `set_stance`, and a compile begun in an autograd thread
    (`backward_ahead` avoids it). StrategyError on a torch that it was not proved on.
    """
    _refuse_unproved()
    _INSTALLATION.enter()
    try:
        yield
    finally:
        _INSTALLATION.leave()


def _refuse_unproved() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) not in PROVED_ON:
        proved = ", ".join(f"{a}.{b}" for a, b in PROVED_ON)
        raise StrategyError(
            f"torch {proved}, on which isolated tracing was proved",
            torch.__version__,
            "use --attn-strategy locked-compile, which patches nothing",
        )


class _Ahead:
    """Counts scopes of `backward_ahead` in torch 2.11, where the setting is one for the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.scopes = 0
        self.before = False


_AHEAD = _Ahead()


@contextmanager
def backward_ahead() -> Iterator[None]:
    """Compiles a function's backward together with its forward, in the thread that calls it.

    Without it the backward is compiled in autograd's thread of the device: one that another thread's trace may wait
    for while it holds compile_lock, which hangs both. Per thread from torch 2.12, per process (counted) in 2.11.
    """
    config = functorch_config()
    with _AHEAD.lock:
        before = config.force_non_lazy_backward_lowering
        if _AHEAD.scopes == 0:
            _AHEAD.before = before
        _AHEAD.scopes += 1
        config.force_non_lazy_backward_lowering = True
    try:
        yield
    finally:
        with _AHEAD.lock:
            _AHEAD.scopes -= 1
            if config_is_per_context():
                config.force_non_lazy_backward_lowering = before
            elif _AHEAD.scopes == 0:
                config.force_non_lazy_backward_lowering = _AHEAD.before


class Isolated:
    """isolated_tracing, the backward compiled ahead, and cold steps alone in the process as under locked-compile.

    The gate is for what no patch can tell apart by thread: a compile puts the random state, the default dtype and the
    deterministic flags back to what they were when it began, which would rewind other steps. The patches are for what
    no gate can hold back: traces, compiles and mask builds of code that knows nothing of steps.
    """

    name = "isolated"

    def __init__(self, gate: Gate = PROCESS_GATE) -> None:
        _refuse_unproved()
        self._steps = LockedCompile(gate)

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function; a call outside any step is safe, but other threads' random state is not."""
        # imported here, in the building thread: a first import under compile_lock could wait for another thread's
        # import that waits for compile_lock
        resolve("inductor.lowerings")
        return cast(Fn, torch.compile(fn, dynamic=False))

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        """Patches torch while any thread is inside; compiles this thread's backward ahead."""
        with isolated_tracing(), backward_ahead():
            yield

    def step_scope(self, key: Hashable) -> AbstractContextManager[None]:
        """Exclusive while `key` is cold, shared afterwards."""
        return self._steps.step_scope(key)


__all__ = ["PROVED_ON", "Isolated", "backward_ahead", "isolated_tracing"]
