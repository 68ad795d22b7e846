"""ANNOTATE (a): of two threads that build a BlockMask at once, one raises KeyError('custom')."""

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
import torch.fx.traceback
from torch.nn.attention.flex_attention import BlockMask


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A and B build a mask; `annotate` looks for an annotation, then reaches "read", sets one, reaches "annotated"."""
    argsort = torch.argsort

    def build() -> None:
        BlockMask.from_kv_blocks(torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32))

    torch.fx.traceback.copy = SimpleNamespace(copy=lambda value: (at("read"), copy.copy(value))[1])
    torch.argsort = lambda *inputs, **options: (at("annotated"), argsort(*inputs, **options))[1]
    return {"A": build, "B": build}


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    a_annotated, b_read, a_done = threading.Event(), threading.Event(), threading.Event()
    failures: list[str] = []

    def at(place: str) -> None:
        if (threading.current_thread().name, place) == ("A", "annotated"):
            a_annotated.set()
            b_read.wait(patience_s)
        elif (threading.current_thread().name, place) == ("B", "read"):
            b_read.set()
            a_done.wait(patience_s)

    def build(program: Callable[[], object]) -> None:
        try:
            with scope(object()):
                program()
        except KeyError as error:
            failures.append(f"KeyError: {error}")

    threads = [threading.Thread(target=build, args=(work,), name=name) for name, work in programs(at).items()]
    threads[0].start()
    a_annotated.wait(patience_s)
    threads[1].start()
    threads[0].join()
    a_done.set()
    threads[1].join()
    print(f"ANNOTATE-A {'shown' if failures else 'not shown'} on torch {torch.__version__}: {failures or 'two masks'}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
