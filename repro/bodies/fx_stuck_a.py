"""FXSTUCK-A: two traces overlap and end in the order they began: patches (and, up to 2.13, the flag) stay for ever."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx._symbolic_trace as symbolic_trace


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A and B each trace a function of their own; `at("body")` is reached inside each trace."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        at("body")
        return x + 1

    return {name: lambda: torch.fx.symbolic_trace(traced) for name in "AB"}


def left_behind() -> list[str]:
    """What no thread is using any more and is still there."""
    patched = torch.nn.Module.__call__ is not symbolic_trace._orig_module_call
    flag = getattr(symbolic_trace, "_is_fx_tracing_flag", False)
    return ["nn.Module.__call__ patched"] * patched + ["FX flag True"] * flag


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    entered = {name: threading.Event() for name in "AB"}
    a_done = threading.Event()

    def hold(_: str) -> None:
        name = threading.current_thread().name
        entered[name].set()
        (entered["B"] if name == "A" else a_done).wait(patience_s)

    def trace(program: Callable[[], object]) -> None:
        with scope(object()):
            program()

    work = programs(hold)
    threads = {name: threading.Thread(target=trace, args=(work[name],), name=name, daemon=True) for name in "AB"}
    threads["A"].start()
    entered["A"].wait(patience_s)
    threads["B"].start()
    threads["A"].join()
    a_done.set()
    threads["B"].join()
    rest = left_behind()
    print(f"FXSTUCK-A {'shown' if rest else 'not shown'} on torch {torch.__version__}: left {rest or 'nothing'}")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
