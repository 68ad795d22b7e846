"""One compiled entry a code object: right values, one compile a signature whoever asks, and no needless ones."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dflash.attention.one_entry import compiled, signature
from repro.fork import in_fork


def scaled(x: Tensor, factor: float, pair: tuple[Tensor, Tensor]) -> Tensor:
    return x * factor + pair[0] - pair[1]


class Layer(torch.nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor, *, bias: float = 1.0) -> Tensor:
        return x * self.weight + bias


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs are run as they are: what is tested is how often they are made."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: real(fn, backend="eager", dynamic=dynamic))
    yield
    torch.compiler.reset()


def frames() -> int:
    return int(counters["frames"]["total"])


def test_functions_and_methods_with_defaults_and_keywords_give_their_own_values() -> None:
    pair = (torch.ones(3), torch.zeros(3))
    assert compiled(scaled)(torch.ones(3), 2.0, pair).tolist() == [3.0] * 3
    for weight in (2.0, 5.0):
        forward = compiled(Layer(weight).forward)
        assert forward(torch.ones(2)).tolist() == [weight + 1] * 2
        assert forward(torch.ones(2), bias=0.0).tolist() == [weight] * 2


def test_a_signature_is_compiled_once_for_all_instances_and_another_one_anew() -> None:
    start, pair = frames(), (torch.ones(4), torch.zeros(4))
    for _ in range(3):
        call = compiled(scaled)
        for _ in range(2):
            call(torch.ones(4), 3.0, pair)
    assert frames() == start + 1
    call(torch.ones(4), 4.0, pair)
    call(torch.ones(4, dtype=torch.float64), 4.0, pair)
    with torch.no_grad():
        call(torch.ones(4), 3.0, pair)
    assert frames() == start + 4


def test_more_signatures_than_dynamos_limit_of_entries_all_stay_compiled() -> None:
    call, start = compiled(scaled), frames()
    sizes = range(2, 2 + torch._dynamo.config.recompile_limit + 4)
    for _ in range(2):
        for size in sizes:
            call(torch.ones(size), 1.5, (torch.ones(size), torch.ones(size)))
    assert frames() == start + len(sizes)


def test_signatures_tell_shapes_strides_dtypes_devices_gradients_values_and_nesting_apart() -> None:
    x = torch.zeros(2, 3)
    values = [x, x.T, x.double(), x[:1], x.clone().requires_grad_(), (x, x), [x, [x]], {"a": x}, 1, "1", None]
    assert len({signature(value) for value in values}) == len(values)
    assert signature((x, 1)) == signature((torch.ones(2, 3), 1))


def needless_compiles(make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], seconds: float) -> int:
    """Compiles while three threads do nothing but warm calls of two shapes, with frequent switches of threads."""
    call = make(scaled)
    inputs = [(torch.ones(n), 1.0, (torch.ones(n), torch.ones(n))) for n in (3, 5)]
    for entry in inputs:
        call(*entry)
    warm, deadline = frames(), time.monotonic() + seconds
    sys.setswitchinterval(1e-5)

    def work() -> None:
        turn = 0
        while time.monotonic() < deadline and frames() == warm:
            call(*inputs[turn % 2])
            turn += 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return frames() - warm


@pytest.mark.race
def test_warm_calls_from_several_threads_never_compile_again_though_torchs_own_cache_makes_them() -> None:
    def plain(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(fn, dynamic=False)  # type: ignore[return-value]

    assert in_fork(lambda: needless_compiles(compiled, 4.0)) == 0
    assert in_fork(lambda: needless_compiles(plain, 60.0), limit_s=120) > 0
