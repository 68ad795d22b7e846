"""DTYPEREVERT: settings that one thread makes are undone when another thread's compile ends."""

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
            try:
                cold(torch.ones(3))
            except AssertionError as error:  # dynamo may notice that the state changed under it
                print(f"compile: {error}")

    compiler = threading.Thread(target=compile_cold)
    compiler.start()
    inside.wait(patience_s)
    with scope(object()):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
    leave.set()
    compiler.join()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    shown = dtype != torch.float64 or not deterministic
    print(
        f"DTYPEREVERT {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"set torch.float64 and deterministic True; after the other thread's compile {dtype} and {deterministic}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
