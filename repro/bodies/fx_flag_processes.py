"""FXFLAG between processes: another process traces, so the compiled call must not notice (in fx_flag.py it does)."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from multiprocessing.synchronize import Event

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def trace(inside: Event, leave: Event, patience_s: float) -> None:
    """Holds a make_fx trace open in this process until told to leave."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        leave.wait(patience_s)
        return x + 1

    make_fx(traced)(torch.ones(2))


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    processes = get_context("spawn")
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(2))
    inside, leave = processes.Event(), processes.Event()
    tracer = processes.Process(target=trace, args=(inside, leave, 60.0))
    tracer.start()
    if not inside.wait(90.0):
        raise TimeoutError("the other process did not begin its trace in 90 s")
    raised = "the call returned"
    try:
        with scope("call"):
            compiled(torch.ones(2))
    except RuntimeError as error:
        raised = f"the call raised {error}"
    still_tracing = tracer.is_alive() and not leave.is_set()
    leave.set()
    tracer.join()
    if not still_tracing:
        raise RuntimeError("the trace had ended before the call: nothing was shown")
    shown = "symbolically trace" in raised
    print(f"FXFLAG-PROCESSES {'shown' if shown else 'not shown'} on torch {torch.__version__}: {raised}")
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
