"""SEGV211: CUDA build, no GPU: the second short-lived thread that compiles crashes the process (run `-X faulthandler`).

FakeTensorMode installs a stand-in CUDA device guard for the whole process, owned by the thread that installed it.
"""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    def compile_once(number: int) -> None:
        with scope(f"compile {number}"):
            torch.compile(lambda x: x + number, backend="eager", dynamic=False)(torch.ones(3))

    for number in range(4):
        thread = threading.Thread(target=compile_once, args=(number,))
        thread.start()
        thread.join(patience_s)
        print(f"thread {number} compiled and ended")
    print(f"SEGV211 not shown on torch {torch.__version__}: four threads compiled one after another")
    return 0


if __name__ == "__main__":
    sys.exit(main())
