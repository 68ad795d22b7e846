"""SETRNG: `torch.cuda.set_rng_state` does nothing, in every thread, while AOTAutograd collects metadata in one."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

inside, leave = threading.Event(), threading.Event()
replaced: list[bool] = []


@torch.library.custom_op("repro_set_rng::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    original = torch.cuda.set_rng_state

    @copy.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.set_rng_state is not original and not inside.is_set():
            inside.set()
            leave.wait(patience_s)
        return torch.empty_like(x)

    cold = torch.compile(lambda x: copy(x) + 1, backend="aot_eager")

    def compile_cold() -> None:
        with scope("cold"):
            cold(torch.ones(3))
        inside.set()

    compiler = threading.Thread(target=compile_cold)
    compiler.start()
    inside.wait(patience_s)
    with scope(object()):
        current = torch.cuda.set_rng_state
    leave.set()
    compiler.join()
    shown = current is not original
    print(
        f"SETRNG {'shown' if shown else 'not shown'} on torch {torch.__version__}: "
        f"torch.cuda.set_rng_state in an innocent thread is {current.__module__}.{current.__qualname__}"
    )
    return int(shown)


if __name__ == "__main__":
    sys.exit(main())
