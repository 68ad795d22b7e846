"""AOTWINDOW: a warm compiled call raises because another thread's torch.compile is tracing in AOTAutograd."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx._symbolic_trace as symbolic_trace

inside, leave = threading.Event(), threading.Event()


@torch.library.custom_op("repro_aot_window::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    @copy.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if symbolic_trace.CURRENT_PATCHER is not None:  # AOTAutograd's trace, not dynamo's
            inside.set()
            leave.wait(patience_s)
        return torch.empty_like(x)

    warm = torch.compile(lambda x: x * 3, backend="eager")
    warm(torch.ones(3))
    cold = torch.compile(lambda x: copy(x) + 1, backend="aot_eager")

    def compile_cold() -> None:
        with scope("cold"):
            cold(torch.ones(3))

    compiler = threading.Thread(target=compile_cold)
    compiler.start()
    inside.wait(patience_s)
    raised = "the call returned"
    try:
        with scope("warm"):
            warm(torch.ones(3))
    except RuntimeError as error:
        raised = f"the call raised {error}"
    leave.set()
    compiler.join()
    shown = "symbolically trace" in raised
    print(f"AOTWINDOW {'shown' if shown else 'not shown'} on torch {torch.__version__}: {raised}")
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
