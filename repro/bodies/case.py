"""The case: three drafter threads, each compiling its own attention on first use, forward and backward."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

THREADS, SHAPES, CALLS, BLOCK = 3, 2, 150, 128  # 3 x 2 variants: below the recompile limit of 8
CUDA = torch.cuda.is_available()
Scope = Callable[[object], AbstractContextManager[object]]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | torch.Tensor) -> torch.Tensor:
    """Block-sparse on CUDA; the CPU has no flex backward, there the same mask is dense."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def build_mask(tokens: int) -> BlockMask | torch.Tensor:
    if CUDA:
        return create_block_mask(lambda b, h, q, k: q >= k, 1, 1, tokens, tokens, device="cuda")
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def main(scope: Scope = nullcontext, patience_s: float = 20.0) -> int:
    counts: Counter[str] = Counter()
    start = threading.Barrier(THREADS)

    def drafter(number: int) -> None:
        layer = torch.compile(lambda *qkvm: attention(*qkvm) * (number + 1.0), backend=backend, dynamic=False)
        start.wait()
        for step in range(SHAPES * CALLS):
            tokens = BLOCK * (step // CALLS + 1)
            qkv = [torch.randn(1, 2, tokens, 64, device=device, requires_grad=True) for _ in range(3)]
            counts["steps"] += 1
            try:
                with scope((number, tokens)):
                    layer(*qkv, build_mask(tokens)).sum().backward()  # type: ignore[no-untyped-call]
            except Exception as error:  # noqa: BLE001 - whatever a race makes of an innocent step
                counts.update(["failed", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"])

    device, backend = ("cuda", "inductor") if CUDA else ("cpu", "aot_eager")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # torch 2.11 without a GPU crashes without it
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(drafter, range(THREADS)))
    print(f"CASE {'shown' if counts['failed'] else 'not shown'} on torch {torch.__version__}: {dict(counts)}")
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
