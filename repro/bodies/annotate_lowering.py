"""ANNOTATE (c): compiling flex_attention while another thread builds a mask raises LoweringException."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

at_flex, annotated, compiled = threading.Event(), threading.Event(), threading.Event()


class HoldInArgsort(TorchFunctionMode):
    """Holds its own thread inside the annotated statement of `create_block_mask`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.argsort:
            annotated.set()
            compiled.wait(60)
        return function(*args, **(kwargs or {}))


def main(scope: Callable[[object], AbstractContextManager[object]] = nullcontext, patience_s: float = 20.0) -> int:
    def build() -> None:
        at_flex.wait(120)
        with scope(object()), HoldInArgsort():
            create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        if "flex" in str(target) and symbolic_trace.CURRENT_PATCHER is not None and not at_flex.is_set():
            at_flex.set()
            annotated.wait(patience_s)
        return original(self, target, args, kwargs)

    original = torch.fx.Interpreter.call_function
    torch.fx.Interpreter.call_function = call_function
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    builder = threading.Thread(target=build, daemon=True)
    builder.start()
    raised = ""
    try:
        with scope("flex"):
            torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=mask)
    except InductorError as error:
        raised = str(error).splitlines()[0]
    compiled.set()
    builder.join()
    print(f"ANNOTATE-C {'shown' if raised else 'not shown'} on torch {torch.__version__}: {raised or 'compiled'}")
    return int(bool(raised))


if __name__ == "__main__":
    sys.exit(main())
