"""DEADLOCK without a GPU: a queue served by one thread stands in for the autograd engine's device thread.

T1 holds dynamo's compile_lock (it compiles) and waits for that thread; the thread runs T2's backward, whose lazy
compile waits for compile_lock.
"""

import queue
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    jobs: queue.Queue[Callable[[], object]] = queue.Queue()
    compiling, backward_begun = threading.Event(), threading.Event()

    def device_thread() -> None:
        while True:
            jobs.get()()

    def on_device_thread(job: Callable[[], object]) -> None:
        done = threading.Event()
        jobs.put(lambda: (job(), done.set()))
        done.wait()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiling.set()
        backward_begun.wait(patience_s)
        on_device_thread(lambda: None)  # as tracing flex's joint graph runs autograd on the device thread
        return graph.forward

    def compile_t1() -> None:
        with scope("t1"):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))

    def train_t2() -> None:
        with scope("t2"):
            loss = torch.compile(lambda x: (x * x.sin()).sum())(torch.ones(2, requires_grad=True))
            compiling.wait(patience_s)
            on_device_thread(lambda: (backward_begun.set(), loss.backward()))

    threads = [threading.Thread(target=work, daemon=True) for work in (device_thread, train_t2, compile_t1)]
    for thread in threads[:2]:
        thread.start()
    threads[1].join(0.01)
    threads[2].start()
    for thread in threads[1:]:
        thread.join(patience_s * 3)
    stuck = [thread.name for thread in threads[1:] if thread.is_alive()]
    print(f"DEADLOCK-MODEL {'shown' if stuck else 'not shown'} on torch {torch.__version__}: still waiting {stuck or ''}")
    return int(bool(stuck))


if __name__ == "__main__":
    sys.exit(main())
