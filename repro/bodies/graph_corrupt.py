"""GRAPHCORRUPT: a thread that only calls a module eagerly writes a node into the graph another thread is tracing."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

inside, leave = threading.Event(), threading.Event()


class Model(torch.nn.Module):
    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self.patience_s = patience_s
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> object:
        if isinstance(x, torch.fx.Proxy):
            inside.set()
            leave.wait(self.patience_s)
        return self.linear(x)


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    model = Model(patience_s)
    calls: list[int] = []

    def trace() -> None:
        with scope("trace"):
            graph = torch.fx.symbolic_trace(model).graph
        calls.append(sum(node.op == "call_module" for node in graph.nodes))

    tracer = threading.Thread(target=trace)
    tracer.start()
    inside.wait(patience_s)
    result = "raised"
    try:
        with scope("eager call"):
            result = type(model.linear(torch.ones(1, 2))).__name__
    except (NameError, RuntimeError, TypeError) as error:
        result = f"raised {type(error).__name__}: {error}"
    leave.set()
    tracer.join()
    shown = result != "Tensor" or calls != [1]
    print(
        f"GRAPHCORRUPT {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"the eager call gave {result}, the graph has {calls} calls of the module instead of [1]"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
