"""ANNOTATE (a): of two threads that build a BlockMask at once, one raises KeyError('custom')."""

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
import torch.fx.traceback
from torch.nn.attention.flex_attention import create_block_mask


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A and B build a mask; `at("read")` is reached when `annotate` has looked for an annotation and set none yet."""

    def build() -> None:
        create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=32)

    torch.fx.traceback.copy = SimpleNamespace(copy=lambda value: (at("read"), copy.copy(value))[1])
    return {"A": build, "B": build}


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    both = threading.Barrier(2, timeout=patience_s)
    failures: list[str] = []
    waited: set[str] = set()

    def at(_: str) -> None:
        name = threading.current_thread().name
        if name not in waited:  # the first of the two annotations that a mask needs
            waited.add(name)
            try:
                both.wait()
            except threading.BrokenBarrierError:
                return

    def build(program: Callable[[], object]) -> None:
        try:
            with scope(object()):
                program()
        except KeyError as error:
            failures.append(f"KeyError: {error}")

    threads = [threading.Thread(target=build, args=(work,), name=name) for name, work in programs(at).items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"ANNOTATE-A {'shown' if failures else 'not shown'} on torch {torch.__version__}: {failures or 'two masks'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
