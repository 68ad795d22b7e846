"""What the recording probes cost a warm compiled call of about 1 ms, measured in turns on this machine.

A callable compiled before the probe (not watched) and one compiled inside it (watched) do the same work in turns, so
that a slow moment of the machine hits both alike; the cost is the difference of their lower deciles, the calls that
other processes disturbed least. Times are CPU time of the calling thread (run with OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType

import torch

from probes import compile_trace, compiled_calls, torch_internals
from probes.command_line import CLEAN, FINDING, UsageProblem, console, print_json, probe_parser, run_command, table

LIMIT = 0.05
_HOOKED = ("dynamo.wrap", "dynamo.compile_frame", "dynamo.call_backend", "dynamo.event_start", "dynamo.event_end",
           "dynamo.lock", "fx.trace", "fx.patch_method", "inductor.post_compile")  # fmt: skip
_PROBES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "compiled_calls": compiled_calls.watch,
    "compile_trace": compile_trace.trace,
}


@dataclass(frozen=True)
class ProbeCost:
    """One probe: the unwatched call's time, the probe's cost for a watched one, and what stays after it left."""

    probe: str
    call_us: float
    installed_us: float
    after_us: float
    hooks_left: int

    @property
    def share(self) -> float:
        """Cost as a share of the call, installed."""
        return self.installed_us / self.call_us


@dataclass(frozen=True)
class OverheadResult:
    """All probes, and how many torch functions differ from the original when no probe is installed (0)."""

    probes: tuple[ProbeCost, ...]
    hooks_when_not_installed: int

    @property
    def finding(self) -> bool:
        """True when a probe costs 5 % of the call or more, or leaves a hook behind."""
        too_dear = any(cost.share >= LIMIT for cost in self.probes)
        return too_dear or bool(self.hooks_when_not_installed) or any(cost.hooks_left for cost in self.probes)


def measure(*, pairs: int = 200, probes: Sequence[str] = tuple(_PROBES)) -> OverheadResult:
    """Measure the named probes with `pairs` pairs of calls each (about 5 ms a pair)."""
    torch_internals.resolve("dynamo.patch_torch")()  # once in a process, dynamo wraps Tracer.trace for itself
    originals = {key: torch_internals.resolve(key) for key in _HOOKED}
    costs = tuple(_cost(name, pairs, originals) for name in probes)
    return OverheadResult(costs, _hooks_left(originals))


def _cost(name: str, pairs: int, originals: dict[str, object]) -> ProbeCost:
    work, x = _work_of_one_ms()
    plain = torch.compile(_with_own_code(work), backend="eager")
    plain(x)
    with _PROBES[name]():
        watched = torch.compile(_with_own_code(work), backend="eager")
        watched(x)
        call_us, installed_us = _paired(plain, watched, x, pairs)
    _, after_us = _paired(plain, watched, x, pairs)
    return ProbeCost(name, call_us, installed_us, after_us, _hooks_left(originals))


def _with_own_code(work: FunctionType) -> FunctionType:
    """The same function with a code object of its own: dynamo tries all compiled entries of a code one by one."""
    return FunctionType(work.__code__.replace(), work.__globals__, work.__name__, None, work.__closure__)


def _paired(
    plain: Callable[[torch.Tensor], object], watched: Callable[[torch.Tensor], object], x: torch.Tensor, pairs: int
) -> tuple[float, float]:
    """Lower decile of the plain call's times and how much higher the watched call's is, in microseconds."""
    plain_us: list[float] = []
    watched_us: list[float] = []
    for index in range(pairs):
        turns = [(plain, plain_us), (watched, watched_us)]
        for call, times in turns if index % 2 else reversed(turns):
            times.append(_time_us(call, x))
    base_us = _lower_decile(plain_us)
    return base_us, _lower_decile(watched_us) - base_us


def _lower_decile(times_us: Sequence[float]) -> float:
    return sorted(times_us)[len(times_us) // 10]


def _time_us(call: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    start = time.thread_time_ns()
    call(x)
    return (time.thread_time_ns() - start) / 1000


def _work_of_one_ms() -> tuple[FunctionType, torch.Tensor]:
    """A chain of matrix products that takes about 1 ms here, and its input."""
    x = torch.eye(96)
    products = max(
        1, round(1000 / min(_time_us(lambda y: [torch.mm(y, y) for _ in range(50)], x) / 50 for _ in range(9)))
    )

    def work(y: torch.Tensor) -> torch.Tensor:
        for _ in range(products):
            y = torch.mm(y, x)
        return y

    assert isinstance(work, FunctionType)
    return work, x


def _hooks_left(originals: dict[str, object]) -> int:
    return sum(torch_internals.resolve(key) is not original for key, original in originals.items())


def main(argv: Sequence[str]) -> int:
    """Command line; returns 0 when every probe costs under 5 %, 1 otherwise."""
    parser = probe_parser("overhead", (__doc__ or "").split("\n", 1)[0], "python -m probes.overhead --pairs 500")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of calls measured for each probe")
    options = parser.parse_args(list(argv))
    if options.pairs < 1:
        raise UsageProblem(f"expected --pairs of 1 or more, got {options.pairs}")
    result = measure(pairs=options.pairs)
    if options.json:
        print_json(result)
        return FINDING if result.finding else CLEAN
    title = f"torch {torch.__version__}: cost of a probe for one warm compiled call"
    columns = ("probe", "call, not installed", "installed", "share", "after it left", "hooks left")
    rows = table(title, *columns)
    for cost in result.probes:
        rows.add_row(cost.probe, f"{cost.call_us:.0f} us", f"{cost.installed_us:+.1f} us", f"{cost.share:.2%}",
                      f"{cost.after_us:+.2f} us", str(cost.hooks_left))  # fmt: skip
    out = console()
    out.print(rows)
    out.print(f"not installed: {result.hooks_when_not_installed} of torch's functions replaced, so 0 us")
    return FINDING if result.finding else CLEAN


if __name__ == "__main__":
    run_command(main)
