"""PATCHREVERT: a compile reverts the patches of another thread's trace, and re-applies them after that trace."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch


def programs(at: Callable[[str], object]) -> dict[str, Callable[[], object]]:
    """A traces; B compiles the second half of a function that it began before A's trace."""
    pause = torch._dynamo.disable(lambda: at("between"))
    broken_in_two = torch.compile(
        lambda x: (x + 1, pause(), x * 2), backend=lambda graph, _: (at("backend"), graph.forward)[1]
    )
    trace = partial(torch.fx.symbolic_trace, lambda x: (at("body"), x)[1])
    return {"A": trace, "B": lambda: broken_in_two(torch.ones(2))}


def left_behind() -> list[str]:
    """What a plain eager module does once both threads have ended."""
    try:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    except NameError as error:
        return [f"an eager Linear raises NameError: {error}"]
    return []


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    reached = {place: threading.Event() for place in ("between", "body", "backend", "end of A")}
    until = {"between": "body", "body": "backend", "backend": "end of A"}

    def hold(place: str) -> None:
        if place != "backend" or reached["between"].is_set():  # not the compile of the first half
            reached[place].set()
            reached[until[place]].wait(patience_s)

    def run(program: Callable[[], object]) -> None:
        with scope(object()):
            program()

    threads = {name: threading.Thread(target=run, args=(program,)) for name, program in programs(hold).items()}
    threads["B"].start()
    reached["between"].wait(patience_s)
    threads["A"].start()
    threads["A"].join()
    reached["end of A"].set()
    threads["B"].join()
    rest = left_behind()
    print(f"PATCHREVERT {'shown' if rest else 'not shown'} on torch {torch.__version__}: later {rest or 'all is well'}")
    return int(bool(rest))


if __name__ == "__main__":
    sys.exit(main())
