"""FLEXCOLD: three threads each build a mask and compile flex_attention for the first time; calls fail or crash."""

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

THREADS = 3


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    """`FLEX_COLD_MASK=main` builds the mask in main; `FLEX_COLD_GUARD=main` makes main own 2.11's CUDA guard."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failures: list[str] = []
    start = threading.Barrier(THREADS)

    def build(tokens: int) -> BlockMask:
        with scope(object()):
            return create_block_mask(lambda b, h, q, k: q >= k, 1, 1, tokens, tokens, device=device)

    def work(number: int) -> None:
        tokens = 128 * (number + 1)
        compiled = torch.compile(flex_attention, dynamic=False)
        start.wait()
        try:
            mask = shared if shared is not None else build(tokens)
            q, k, v = (torch.randn(1, 2, 128 if shared is not None else tokens, 16, device=device) for _ in range(3))
            with scope(("flex", tokens)):
                compiled(q, k, v, block_mask=mask)
        except Exception as error:  # noqa: BLE001 - whatever a race makes of an innocent call
            failures.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    if os.environ.get("FLEX_COLD_GUARD") == "main":
        torch._C._ensureCUDADeviceGuardSet()
    shared = build(128) if os.environ.get("FLEX_COLD_MASK") == "main" else None
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        f"FLEXCOLD {'shown' if failures else 'not shown'} on torch {torch.__version__}: "
        f"{len(failures)} of {THREADS} first calls failed {failures or ''}"
    )
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
