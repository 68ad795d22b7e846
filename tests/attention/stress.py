"""`python -m tests.attention.stress --strategy isolated --seconds 600`: threads compile, trace, fail and call at once.

Every result is checked against plain arithmetic; at the end torch must be as it was. Exit code 1 when anything failed.
"""

import argparse
import random
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask

from dflash.attention import STRATEGIES
from dflash.attention.base import Strategy, step_key
from dflash.attention.compiled_calls import counted_compiled_calls
from probes.torch_internals import not_at_rest, snapshot

SIZES = (3, 8, 17, 64)


class Thrown(Exception):
    """Thrown on purpose inside a step."""


def arithmetic(x: Tensor) -> Tensor:
    return (x.sin() * 2 + x).sum()


def fresh(serial: int) -> Callable[[Tensor], Tensor]:
    """The same arithmetic with a code object of its own, which dynamo compiles anew."""
    code = arithmetic.__code__.replace(co_name=f"arithmetic_{serial}")
    return types.FunctionType(code, globals())


class Stress:
    """What the threads do; `outside` adds what takes no step, which only `isolated` keeps apart."""

    def __init__(self, strategy: Strategy, seconds: float, outside: bool) -> None:
        self.strategy, self.outside = strategy, outside
        self.deadline = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.functions = [(serial, strategy.compile(fresh(serial), role="layer")) for serial in range(3)]
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.lock = threading.Lock()

    def thread(self, seed: int) -> None:
        """Until the time is up, or once at least."""
        draw = random.Random(seed)
        acts = [self.step] * 6 + [self.failing_step, self.new_function]
        if self.outside:
            acts += [self.trace, self.eager_module, self.mask] * 2
        with self.strategy.thread_scope():
            for act in acts:
                self.attempt(act, draw)
            while time.monotonic() < self.deadline:
                self.attempt(draw.choice(acts), draw)

    def attempt(self, act: Callable[[random.Random], object], draw: random.Random) -> None:
        try:
            act(draw)
        except Exception as error:  # noqa: BLE001 - whatever a race makes of an innocent act
            with self.lock:
                self.failures.append(f"{act.__name__}: {' '.join(repr(error).split())[:120]}")
        with self.lock:
            self.counts[act.__name__] += 1

    def step(self, draw: random.Random) -> None:
        serial, function = draw.choice(self.functions)
        x = torch.full((draw.choice(SIZES),), draw.random(), requires_grad=True)
        with self.strategy.step_scope(step_key(x, extra=serial)):
            out = function(x)
            out.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(out.detach(), arithmetic(x.detach()))
        torch.testing.assert_close(x.grad, 2 * x.detach().cos() + 1)

    def failing_step(self, draw: random.Random) -> None:
        serial, function = draw.choice(self.functions)
        x = torch.ones(draw.choice(SIZES), requires_grad=True)
        try:
            with self.strategy.step_scope(step_key(x, extra=serial)):
                function(x)
                raise Thrown
        except Thrown:
            pass

    def new_function(self, draw: random.Random) -> None:
        with self.lock:
            serial = len(self.functions)
            self.functions.append((serial, self.strategy.compile(fresh(serial), role="layer")))
        self.step(draw)

    def trace(self, draw: random.Random) -> None:
        graph = make_fx(lambda x: x.sin() + 1)(torch.ones(draw.choice(SIZES))).graph
        assert sum(node.op == "call_function" for node in graph.nodes) == 2
        calls = [node for node in torch.fx.symbolic_trace(self.module).graph.nodes if node.op == "call_module"]
        assert len(calls) == 2, calls

    def eager_module(self, draw: random.Random) -> None:
        for _ in range(20):
            out: Any = self.module(torch.ones(1, 4))
            assert type(out) is Tensor, type(out)
            assert not torch.compiler.is_compiling()

    def mask(self, draw: random.Random) -> None:
        create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=32)


def run(strategy: Strategy, seconds: float, threads: int, outside: bool) -> tuple[Stress, int, list[str]]:
    """The finished stress, how often compiled code ran, and what was left behind."""
    with counted_compiled_calls() as count:
        stress = Stress(strategy, seconds, outside)
        workers = [threading.Thread(target=stress.thread, args=(seed,), daemon=True) for seed in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds + 300)
            if worker.is_alive():
                stress.failures.append("a thread hangs")
        return stress, count.value(), [str(difference) for difference in not_at_rest(snapshot())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="isolated", choices=[*STRATEGIES, "unguarded"])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--outside", action="store_true", help="also traces, eager modules and masks outside any step")
    chosen = parser.parse_args()
    from dflash.attention.unguarded import Unguarded

    strategy = Unguarded() if chosen.strategy == "unguarded" else STRATEGIES[chosen.strategy]()
    stress, compiled, left = run(strategy, chosen.seconds, chosen.threads, chosen.outside)
    acts = ", ".join(f"{name} {times}" for name, times in sorted(stress.counts.items()))
    print(f"torch {torch.__version__} {chosen.strategy}: {len(stress.failures)} failures in acts {acts};")
    print(f"  compiled code ran {compiled} times; left behind: {left or 'nothing'}")
    for text, times in Counter(stress.failures).most_common(5):
        print(f"  {times} x {text}")
    return int(bool(stress.failures or left))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
