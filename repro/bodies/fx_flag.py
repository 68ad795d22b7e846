"""FXFLAG: a warm compiled call raises because another thread is inside make_fx (the FX flag is one for the process)."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A traces, B calls compiled code; `at("body")` is reached inside the trace."""
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(2))

    def traced(x: torch.Tensor) -> torch.Tensor:
        at("body")
        return x + 1

    return {"A": lambda: make_fx(traced)(torch.ones(2)), "B": lambda: compiled(torch.ones(2))}


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    inside, leave = threading.Event(), threading.Event()

    def hold(_: str) -> None:
        inside.set()
        leave.wait(patience_s)

    thread_a, call_b = programs(hold).values()

    def trace() -> None:
        with scope("trace"):
            thread_a()

    tracer = threading.Thread(target=trace)
    tracer.start()
    inside.wait(patience_s)
    raised = "the call returned"
    try:
        with scope("call"):
            call_b()
    except RuntimeError as error:
        raised = f"the call raised {error}"
    leave.set()
    tracer.join()
    shown = "symbolically trace" in raised
    print(f"FXFLAG {'shown' if shown else 'not shown'} on torch {torch.__version__}: {raised}")
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
