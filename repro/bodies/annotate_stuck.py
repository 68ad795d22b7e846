"""ANNOTATE (d): two mask builds that end in the order they began leave the annotation on for the whole process."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx.traceback
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode


class At(TorchFunctionMode):
    """Calls `at` when its thread is inside the annotated statement of `create_block_mask`, which is an argsort."""

    def __init__(self, at: Callable[[], object]) -> None:
        super().__init__()
        self.at = at

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.argsort:
            self.at()
        return function(*args, **(kwargs or {}))


def build_mask() -> None:
    create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=32)


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    inside = {name: threading.Event() for name in "AB"}
    a_done = threading.Event()

    def hold() -> None:
        name = threading.current_thread().name
        inside[name].set()
        (inside["B"] if name == "A" else a_done).wait(patience_s)

    def build() -> None:
        with scope(object()), At(hold):
            build_mask()

    threads = {name: threading.Thread(target=build, name=name) for name in "AB"}
    threads["A"].start()
    inside["A"].wait(patience_s)
    threads["B"].start()
    threads["A"].join()
    a_done.set()
    threads["B"].join()
    rest = torch.fx.traceback.current_meta.get("custom")
    print(f"ANNOTATE-D {'shown' if rest else 'not shown'} on torch {torch.__version__}: left {rest}")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
