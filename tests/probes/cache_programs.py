"""Programs that fill an inductor cache: one poisoned by a schedule, one clean and wide. Run as a script in a child.

python cache_programs.py poison|clean|wide
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

tracing, annotated, compiled = threading.Event(), threading.Event(), threading.Event()
poison = False


def wave(x: torch.Tensor) -> torch.Tensor:
    """A composite op: its body runs while AOTAutograd traces, and can stop there."""
    if poison and get_proxy_mode() is not None and not tracing.is_set():
        tracing.set()
        assert annotated.wait(60), "the mask builder never reached its annotation"
    return x.sin() * 1.01 + 0.5


class StopInSort(TorchDispatchMode):
    """Holds this thread inside create_block_mask's annotation, round the sort that it annotates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "sort" in str(func):
            annotated.set()
            compiled.wait(60)
        return func(*args, **(kwargs or {}))


def build_mask() -> None:
    tracing.wait(60)
    try:
        with StopInSort():
            create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    except KeyError as error:  # the other half of the same race: the annotation it would remove is gone
        print("mask builder raised KeyError", error)


def wide() -> int:
    """Compile many graphs whose eager calls are all legitimate; returns how many."""
    x, square = torch.randn(4, 12), torch.randn(4, 4)
    ids, pair = torch.tensor([3, 1, 2]), torch.randn(3, 2, dtype=torch.complex64)
    wides = [torch.randn(4, k) for k in range(12)]
    fallbacks: list[Callable[[], Callable[..., Any]]] = [
        *(lambda k=k: lambda: torch.topk(x, k) for k in range(1, 11)),
        *(lambda k=k: lambda: torch.kthvalue(x, k) for k in range(1, 11)),
        *(lambda k=k: lambda: torch.mm(square, wides[k]) for k in range(2, 12)),
        *(lambda k=k: lambda: torch.cdist(wides[k], wides[k], p=3.0) for k in range(2, 10)),
        *(lambda k=k: lambda: torch.sort(wides[k], dim=-1, stable=True) for k in range(2, 10)),
        *(lambda k=k: lambda: pair * k for k in range(2, 6)),
        *(lambda k=k: lambda: torch.fft.fft(x, n=k) for k in range(2, 5)),
        lambda: lambda: torch.linalg.svdvals(square),
        lambda: lambda: torch.linalg.inv_ex(square),
        lambda: lambda: torch.bincount(ids, minlength=5),
        lambda: lambda: torch.nonzero(x),
        lambda: lambda: torch.median(x),
        lambda: lambda: torch.mode(x),
        lambda: lambda: torch.histc(x, 4),
    ]
    generated: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda y: (y.sin() * 1.01 + 0.5).sum(-1),
        lambda y: torch.softmax(y, -1) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
    ]
    total = 0
    for make in fallbacks:
        torch.compile(make(), dynamic=False)()
        total += 1
    for body in generated:
        torch.compile(body, dynamic=False)(x)
        total += 1
    return total


def spare_the_c_compiler() -> None:
    """Each candidate instruction set would be tried by compiling a file, and the headers once: 10 s for nothing."""
    importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list = list
    importlib.import_module("torch._inductor.config").cpp_cache_precompile_headers = False


def main(mode: str) -> None:
    global poison
    spare_the_c_compiler()
    if mode == "wide":
        print(wide())
        return
    torch.library.define("cache_programs::wave", "(Tensor x) -> Tensor")
    torch.library.impl("cache_programs::wave", "CompositeImplicitAutograd", wave)
    importlib.import_module("torch._inductor.compile_fx")  # now: two first imports in threads can fail each other

    poison = mode == "poison"
    builder = threading.Thread(target=build_mask, name="mask builder")
    if poison:
        builder.start()
    out = torch.compile(lambda x: torch.ops.cache_programs.wave(x).cos())(torch.ones(8, 64))
    compiled.set()
    if poison:
        builder.join()
    print(f"{out[0, 0].item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
