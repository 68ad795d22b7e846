"""ANNOTATE (b): a mask built in another thread makes inductor emit eager fallbacks for fused kernels, silently."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

at_sin, annotated, compiled = threading.Event(), threading.Event(), threading.Event()


class HoldInArgsort(TorchFunctionMode):
    """Holds its own thread inside the annotated statement of `create_block_mask`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.argsort:
            annotated.set()
            compiled.wait(60)
        return function(*args, **(kwargs or {}))


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    def build() -> None:
        at_sin.wait(120)
        try:
            with scope(object()), HoldInArgsort():
                create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=32)
        except KeyError as error:
            print(f"the mask build raised KeyError: {error}")

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        if target is torch.sin and symbolic_trace.CURRENT_PATCHER is not None and not at_sin.is_set():
            at_sin.set()
            annotated.wait(patience_s)
        return original(self, target, args, kwargs)

    original = torch.fx.Interpreter.call_function
    torch.fx.Interpreter.call_function = call_function
    builder = threading.Thread(target=build)
    builder.start()
    with scope("compile"):
        _, code = run_and_get_code(torch.compile(lambda x: torch.sin(x) * 1.1 + 1, dynamic=False), torch.ones(8))
    compiled.set()
    builder.join()
    fallbacks = code[0].count("torch.ops.aten.sin")
    print(
        f"ANNOTATE-B {'shown' if fallbacks else 'not shown'} on torch {torch.__version__}: "
        f"{fallbacks} eager calls of aten.sin in the generated code instead of 0"
    )
    return int(fallbacks > 0)


if __name__ == "__main__":
    sys.exit(main())
