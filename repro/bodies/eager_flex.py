"""EAGERFLEX: uncompiled flex_attention with grad in three threads fails in bulk: each forward is a trace by make_fx."""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.attention.flex_attention as flex

CALLS, THREADS = 40, 3
Scope = Callable[[object], AbstractContextManager[object]]


def stress(scope: Scope) -> Counter[str]:
    """Counts calls and failures of eager flex in three threads and of a warm compiled function in this one."""
    flex._validate_device = lambda *_: None  # lifts the CPU's refusal of gradients; the operator itself is right
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=32)
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    counts: Counter[str] = Counter()

    def attempt(kind: str, key: object, call: Callable[[], object]) -> None:
        counts[kind] += 1
        try:
            with scope(key):
                call()
        except Exception as error:  # noqa: BLE001 - whatever a race makes of an innocent call
            counts.update([f"{kind} failed", f"{kind} {type(error).__name__}"])

    def eager_step() -> None:
        q, k, v = (torch.randn(1, 1, 32, 16, requires_grad=True) for _ in range(3))
        flex.flex_attention(q, k, v, block_mask=mask).sum().backward()  # type: ignore[no-untyped-call]

    def eager_thread() -> None:
        for _ in range(CALLS):
            attempt("eager", object(), eager_step)

    eager_step()
    attempt("compiled", "compiled", lambda: compiled(torch.ones(2)))
    threads = [threading.Thread(target=eager_thread) for _ in range(THREADS)]
    list(map(threading.Thread.start, threads))
    while any(thread.is_alive() for thread in threads):
        attempt("compiled", "compiled", lambda: compiled(torch.ones(2)))
        threads[0].join(0.001)
    return counts


def main(scope: Scope = nullcontext, patience_s: float = 20.0) -> int:
    warnings.simplefilter("ignore")
    counts = stress(scope)
    shown = "shown" if counts["eager failed"] else "not shown"
    print(f"EAGERFLEX {shown} on torch {torch.__version__}: {dict(sorted(counts.items()))}")
    return int(counts["eager failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
