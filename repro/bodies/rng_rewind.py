"""RNGREWIND: random numbers drawn while another thread compiles are drawn again after that compile ends."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    inside, leave = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        inside.set()
        leave.wait(patience_s)
        return graph.forward

    cold = torch.compile(lambda x: x + 1, backend=backend)

    def compile_cold() -> None:
        with scope("cold"):
            cold(torch.ones(3))

    torch.manual_seed(0)
    compiler = threading.Thread(target=compile_cold)
    compiler.start()
    inside.wait(patience_s)
    with scope(object()):
        during = torch.rand(3).tolist()
    leave.set()
    compiler.join()
    after = torch.rand(3).tolist()
    shown = during == after
    print(
        f"RNGREWIND {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"drawn during the compile {during}, after it {after}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
