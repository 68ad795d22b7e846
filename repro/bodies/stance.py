"""STANCE: `set_stance("force_eager")` in one thread makes another run uncompiled; overlapping scopes make it stick."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    compiled_calls: list[int] = []
    entered = {name: threading.Event() for name in "AB"}
    leave = {name: threading.Event() for name in "AB"}

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*inputs: torch.Tensor) -> object:
            compiled_calls.append(1)
            return graph.forward(*inputs)

        return run

    def ran_compiled() -> bool:
        before = len(compiled_calls)
        with scope("call"):
            compiled(torch.ones(2))
        return len(compiled_calls) > before

    def eager_for_a_while() -> None:
        name = threading.current_thread().name
        with scope(object()), torch.compiler.set_stance("force_eager"):
            entered[name].set()
            leave[name].wait(patience_s)

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    assert ran_compiled(), "the control does not run compiled code"
    threads = {name: threading.Thread(target=eager_for_a_while, name=name) for name in "AB"}
    threads["A"].start()
    entered["A"].wait(patience_s)
    beside = ran_compiled()
    threads["B"].start()
    entered["B"].wait(patience_s / 2)
    for name in "AB":
        leave[name].set()
        threads[name].join()
    after = ran_compiled()
    shown = not (beside and after)
    print(
        f"STANCE {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"ran compiled beside the other thread's scope: {beside}, after both scopes ended: {after}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
