"""EXPORTxCOMPILE: a compile that overlaps another thread's export kills the export and leaves `is_compiling` True."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

exporting, leave_export = threading.Event(), threading.Event()
compiling, leave_compile = threading.Event(), threading.Event()


class Model(torch.nn.Module):
    patience_s = 20.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exporting.set()
        leave_export.wait(self.patience_s)
        return x + 1


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiling.set()
        leave_compile.wait(patience_s)
        return graph.forward

    function = torch.compile(lambda x: x * 2, backend=backend)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # torch 2.11's CUDA build crashes without it
    Model.patience_s = patience_s
    outcome: list[str] = []

    def export() -> None:
        with scope(object()):
            try:
                torch.export.export(Model(), (torch.ones(2),), strict=False)
            except AssertionError as error:
                outcome.append(f"the export raised {error}")

    def compile_function() -> None:
        with scope("compile"):
            function(torch.ones(2))

    threads = [threading.Thread(target=export), threading.Thread(target=compile_function)]
    for thread, begun in zip(threads, (exporting, compiling), strict=True):
        thread.start()
        begun.wait(patience_s)
    for thread, leave in zip(threads, (leave_export, leave_compile), strict=True):
        leave.set()
        thread.join()
    outcome += ["is_compiling() stays True"] * torch.compiler.is_compiling()
    shown = "shown" if outcome else "not shown"
    print(f"EXPORTxCOMPILE {shown} on torch {torch.__version__}: {outcome or 'all is well'}")
    return int(bool(outcome))


if __name__ == "__main__":
    sys.exit(main())
