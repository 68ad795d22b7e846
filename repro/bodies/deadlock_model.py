"""DEADLOCK without a GPU: a thread that serves a queue stands in for the autograd engine's device thread. T1 compiles,
so holds compile_lock, and waits for it; it runs T2's backward, whose lazy compile waits for compile_lock."""

import queue
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

jobs = queue.Queue()  # type: ignore[var-annotated]


def on_device_thread(job: Callable[[], object]) -> None:
    done = threading.Event()
    jobs.put(lambda: (job(), done.set()))  # type: ignore[func-returns-value]
    done.wait()


def device_thread() -> None:
    while True:
        jobs.get()()


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    forward_done, compiling, in_backward = threading.Event(), threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiling.set()
        in_backward.wait(patience_s)
        on_device_thread(lambda: None)  # flex: tracing its joint graph runs autograd on the device thread
        return graph.forward

    def compile_t1() -> None:
        forward_done.wait(120)
        with scope("t1"):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    def train_t2() -> None:
        with scope("t2"):
            loss = torch.compile(lambda x: (x * x.sin()).sum())(torch.ones(2, requires_grad=True))
            forward_done.set()
            compiling.wait(patience_s)
            on_device_thread(lambda: (in_backward.set(), loss.backward()))  # type: ignore[func-returns-value]

    threads = [threading.Thread(target=work, daemon=True) for work in (device_thread, compile_t1, train_t2)]
    for thread in threads:
        thread.start()
    limit_s = 10 if forward_done.wait(120) and compiling.wait(patience_s + 1) and in_backward.wait(patience_s) else 120
    for thread in threads[1:]:
        thread.join(limit_s)
    stuck = [thread.name for thread in threads[1:] if thread.is_alive()]
    print(f"DEADLOCK-MODEL {'shown' if stuck else 'not shown'} on torch {torch.__version__}: still waiting {stuck}")
    return int(bool(stuck))


if __name__ == "__main__":
    sys.exit(main())
