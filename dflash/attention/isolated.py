"""Strategy isolated: tracing and compiling touch the thread that does it and no other."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from dflash.attention.base import Fn, Role
from dflash.attention.cold_steps import GatedStrategy
from dflash.attention.compile_watch import watched_compiles
from dflash.attention.counted_scope import CountedScope
from dflash.attention.gate import PROCESS_GATE, Gate
from dflash.attention.isolated_owner import Owner
from dflash.attention.isolated_patches import patches
from dflash.attention.one_entry import compiled
from dflash.errors import StrategyError
from probes.torch_internals import compile_lock, config_is_per_context, current_patcher, functorch_config, resolve

# releases on which the race suite was run with it and without it
PROVED_ON = ((2, 11), (2, 13), (2, 14))


@contextmanager
def _patched() -> Iterator[None]:
    with ExitStack() as stack:
        # no compile begins before all patches are in, or ends after the first is gone
        with compile_lock():
            if current_patcher() is not None:
                raise StrategyError("no trace in progress", "one in this process", "enter isolated_tracing() earlier")
            for patch in patches(Owner()):
                stack.enter_context(patch)
        try:
            yield
        finally:
            with compile_lock():
                stack.close()


_PATCHED = CountedScope(_patched)


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
    with _PATCHED.entered():
        yield


def _refuse_unproved() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) not in PROVED_ON:
        proved = ", ".join(f"{a}.{b}" for a, b in PROVED_ON)
        raise StrategyError(
            f"torch {proved}, on which isolated tracing was proved",
            torch.__version__,
            "use --attn-strategy locked-compile, which changes nothing in torch's tracing",
        )


@contextmanager
def _compiled_ahead() -> Iterator[None]:
    with functorch_config().patch(force_non_lazy_backward_lowering=True):
        yield


_AHEAD_FOR_ALL = CountedScope(_compiled_ahead)


def backward_ahead() -> AbstractContextManager[None]:
    """Compiles a function's backward together with its forward, in the thread that calls it.

    Without it the backward is compiled in autograd's thread of the device: one that another thread's trace may wait
    for while it holds compile_lock, which hangs both. Per thread from torch 2.12; in 2.11, where settings are one for
    the process, from the first scope of any thread to the last.
    """
    return _compiled_ahead() if config_is_per_context() else _AHEAD_FOR_ALL.entered()


class Isolated(GatedStrategy):
    """isolated_tracing, the backward compiled ahead, and cold steps alone in the process as under locked-compile.

    The gate is for what no patch can tell apart by thread: a compile puts the random state, the default dtype and the
    deterministic flags back to what they were when it began, which would rewind other steps. The patches are for what
    no gate can hold back: traces, compiles and mask builds of code that knows nothing of steps.
    """

    name = "isolated"
    leaves_open = "outside steps: random state, default dtype and stance that another thread changes during a compile"

    def __init__(self, gate: Gate = PROCESS_GATE) -> None:
        _refuse_unproved()
        super().__init__(gate)

    def compile(self, fn: Fn, *, role: Role) -> Fn:
        """Returns the compiled function; a call outside any step is safe, but other threads' random state is not."""
        # imported here, in the building thread: a first import under compile_lock could wait for another thread's
        # import that waits for compile_lock
        resolve("inductor.lowerings")
        return compiled(fn)

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        """Patches torch while any thread is inside; compiles this thread's backward ahead."""
        with isolated_tracing(), backward_ahead(), watched_compiles():
            yield
