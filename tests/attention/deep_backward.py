"""`python -m tests.attention.deep_backward yes|no`: a trace in autograd's own thread, inside a trace under isolation.

A backward nested deeper than the engine allows runs in a thread of its own, as CUDA's does at once. "no" takes away
what hands the trace's ownership on to that thread: it then waits for the lock for ever, and the process ends itself.
"""

import faulthandler
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dflash.attention import isolated_owner
from dflash.attention.isolated import isolated_tracing

THREADS: set[int] = set()


class Deep(torch.autograd.Function):
    """The identity, whose backward runs another backward, `depth` times, and then a trace."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        """x [n] -> x."""
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came."""
        THREADS.add(threading.get_ident())
        if ctx.depth == 0:
            make_fx(lambda x: x * 2)(torch.ones(2))
        else:
            nested(ctx.depth - 1)
        return gradient, None


def nested(depth: int) -> None:
    """One backward of `Deep`."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        Deep.apply(x, depth).sum().backward()


def traced(x: Tensor) -> Tensor:
    """Runs the nested backwards for real while it is traced."""
    with torch.utils._python_dispatch._disable_current_modes():
        nested(70)
    return x + 1


def main(handed_on: str) -> None:
    """Prints how many threads ran a backward."""
    if handed_on == "no":
        isolated_owner._for_a_trace = lambda: False
    with isolated_tracing():
        make_fx(lambda x: x * 2)(torch.ones(2))  # what is imported on the way is not what is waited for
        faulthandler.dump_traceback_later(15, exit=True)
        torch.fx.symbolic_trace(traced)
    print(f"{len(THREADS)} threads")


if __name__ == "__main__":
    main(sys.argv[1])
