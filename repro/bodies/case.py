"""The case: three drafter threads, each compiling its own attention on first use, forward and backward."""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

THREADS, SHAPES, LAYERS, BLOCK = 3, 2, 5, 128  # 3 x 2 variants: below the recompile limit of 8
CUDA = torch.cuda.is_available()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int) -> torch.Tensor:
    """Block-sparse on CUDA; the CPU has no flex backward, there the same mask is dense."""
    if CUDA:
        counts = torch.ones(1, 1, tokens // BLOCK, dtype=torch.int32, device=q.device)
        indices = torch.arange(tokens // BLOCK, dtype=torch.int32, device=q.device).expand(tokens // BLOCK, -1)
        mask = BlockMask.from_kv_blocks(counts, indices.contiguous()[None, None], BLOCK_SIZE=BLOCK)
        return flex_attention(q, k, v, block_mask=mask)
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    counts: Counter[str] = Counter()
    start = threading.Barrier(THREADS)

    def drafter(number: int) -> None:
        layer = torch.compile(lambda *qkvt: attention(*qkvt) * (number + 1.0), backend=backend, dynamic=False)
        start.wait()
        for shape in range(SHAPES):
            for _ in range(LAYERS):
                tokens = BLOCK * (shape + 1)
                qkv = [torch.randn(1, 2, tokens, 64, device=device, requires_grad=True) for _ in range(3)]
                counts["steps"] += 1
                try:
                    with scope((number, shape)):
                        layer(*qkv, tokens).sum().backward()
                except Exception as error:  # noqa: BLE001 - whatever a race makes of an innocent step
                    counts["failed"] += 1
                    counts[f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"] += 1

    warnings.simplefilter("ignore")
    device, backend = ("cuda", "inductor") if CUDA else ("cpu", "aot_eager")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # torch 2.11 without a GPU crashes without it
    threads = [threading.Thread(target=drafter, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"CASE {'shown' if counts['failed'] else 'not shown'} on torch {torch.__version__}: {dict(counts)}")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
