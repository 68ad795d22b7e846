"""DEADLOCK: two threads share one GPU; both compile flex_attention cold, forward and backward, and wait for ever."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

VARIANTS = ("unlocked", "forward", "full", "force")


def main(
    scope: Callable[[object], AbstractContextManager[object]] = nullcontext,
    patience_s: float = 20.0,
    variant: str = "unlocked",
) -> int:
    """`forward` and `full` put one lock round that part of each step; `force` sets the force flag in each thread."""
    if not torch.cuda.is_available():
        print("DEADLOCK skipped: no CUDA device")
        return 77
    lock, none = threading.Lock(), nullcontext()
    forward_lock, full_lock = lock if variant == "forward" else none, lock if variant == "full" else none
    done: list[str] = []
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 1024, 1024, device="cuda")

    def train(number: int) -> None:
        torch._dynamo.config.force_compile_during_fx_trace = variant == "force"
        attention = torch.compile(flex_attention, dynamic=False)
        for step in range(2):
            shape = (1, 2 + number + 2 * step, 1024, 64)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            with scope(shape), full_lock:
                with forward_lock:
                    loss = attention(q, k, v, block_mask=mask).float().sum()
                loss.backward()  # type: ignore[no-untyped-call]
            done.append(f"thread {number} step {step}")

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3 * patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = any(thread.is_alive() for thread in threads)
    if stuck:
        faulthandler.dump_traceback(all_threads=True)
    shown = "shown" if stuck else "not shown"
    print(f"DEADLOCK {shown} on torch {torch.__version__}, {variant}: {len(done)} of 4 steps done", flush=True)
    return int(stuck)


if __name__ == "__main__":
    os._exit(main(variant=(sys.argv[1:] or ["unlocked"])[0]))  # threads that wait for ever must not hold the exit
