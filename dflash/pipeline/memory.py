"""Out of memory, said in terms of the options that decide how much is needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from dflash.errors import OutOfMemory

Role = Literal["target", "drafter"]
# in the order in which to try them
KNOBS: dict[Role, str] = {
    "target": "lower --queue-depth, --data.row-tokens or --data.batch-rows, or give the target a device of its own "
    "(--targets, --drafters)",
    "drafter": "add --checkpoint-layers, or lower --drafter.max-anchors, --data.batch-rows or --data.row-tokens",
}


@contextmanager
def memory_errors(role: Role, device: torch.device, what: str) -> Iterator[None]:
    """Turns running out of memory into OutOfMemory that names the device, `what` was computed, and the options."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = f"{device}, {role}, {what}: out of memory; {KNOBS[role]}, then go on with --resume"
        raise OutOfMemory(text) from error


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's own error on a GPU, for its CPU allocator's, and for Python's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the CPU allocator and some libraries (cuBLAS) have no class of their own for it
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)
