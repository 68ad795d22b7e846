"""ISCOMPILING: `torch.compiler.is_compiling()` is True in a thread that compiles nothing; eager code changes path."""

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

    compiler = threading.Thread(target=compile_cold)
    compiler.start()
    inside.wait(patience_s)
    with scope(object()):
        believed = torch.compiler.is_compiling()
    leave.set()
    compiler.join()
    print(
        f"ISCOMPILING {'shown' if believed else 'not shown'} on torch {torch.__version__}: "
        f"is_compiling() in a thread that compiles nothing is {believed}"
    )
    return int(believed)


if __name__ == "__main__":
    sys.exit(main())
