"""FXSTUCK-B: an eager higher-order op saves another thread's FX flag and restores it after that trace has ended."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._higher_order_ops.utils import setup_compilation_env
from torch.fx.experimental.proxy_tensor import make_fx


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A traces; B does what uncompiled flex_attention, cond or while_loop do round every call."""

    def traced(x: torch.Tensor) -> torch.Tensor:
        at("body")
        return x + 1

    def operator() -> None:
        with setup_compilation_env():
            at("operator")

    return {"A": lambda: make_fx(traced)(torch.ones(2)), "B": operator}


def left_behind() -> list[str]:
    """The flag as it stays once both have ended."""
    return ["FX flag True"] * bool(getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False))


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    tracing, in_operator, a_done = threading.Event(), threading.Event(), threading.Event()

    def hold(place: str) -> None:
        (tracing if place == "body" else in_operator).set()
        (in_operator if place == "body" else a_done).wait(patience_s)

    def run(program: Callable[[], object]) -> None:
        with scope(object()):
            program()

    work = programs(hold)
    threads = {name: threading.Thread(target=run, args=(work[name],)) for name in "AB"}
    threads["A"].start()
    tracing.wait(patience_s)
    threads["B"].start()
    threads["A"].join()
    a_done.set()
    threads["B"].join()
    rest = left_behind()
    print(f"FXSTUCK-B {'shown' if rest else 'not shown'} on torch {torch.__version__}: left {rest or 'nothing'}")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
