"""EXPORTNOOP: `torch.compile(f)` called while another thread exports returns `f` itself, which is never compiled."""

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside.set()
        leave.wait(self.patience_s)
        return x + 1


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def export() -> None:
        with scope(object()):
            torch.export.export(Model(patience_s), (torch.ones(2),), strict=False)

    exporter = threading.Thread(target=export)
    exporter.start()
    inside.wait(patience_s)
    with scope("wrap"):
        compiled = torch.compile(function, backend="eager")
    leave.set()
    exporter.join()
    shown = compiled is function
    print(
        f"EXPORTNOOP {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"torch.compile returned {'the function unchanged' if shown else 'a compiled function'}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
