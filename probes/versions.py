"""Which compile and trace state of this torch is per process, per thread or per context: measured, then compared.

Each state is written in one thread, by the public operation that writes it in real programs, and read meanwhile in two
others: a plain new thread, and one that runs in a copy of the writer's context. Beside it stands what is expected.
"""

from __future__ import annotations

import contextvars
import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from probes import torch_internals as ti
from probes.command_line import CLEAN, FINDING, console, print_json, probe_parser, run_command, table

TIMEOUT_S = 60.0
Visit = Callable[[], None]


class Reach(enum.Enum):
    """How far a write is seen."""

    PROCESS = "every thread"
    CONTEXT = "the writer's context and its copies"
    THREAD = "the writer's thread only"
    UNWRITTEN = "not written"


@dataclass(frozen=True)
class Experiment:
    """`write(visit)` writes the state in the calling thread, calls `visit` once meanwhile, and restores it."""

    name: str
    write: Callable[[Visit], object]
    read: Callable[[], object]
    expected: Callable[[ti.Release], Reach]


@dataclass(frozen=True)
class StateReach:
    """One row: what was found and what the table expects."""

    name: str
    found: Reach
    expected: Reach

    @property
    def agrees(self) -> bool:
        return self.found is self.expected


@dataclass(frozen=True)
class VersionReport:
    """All rows for one torch."""

    torch_version: str
    states: tuple[StateReach, ...]

    @property
    def surprises(self) -> tuple[StateReach, ...]:
        return tuple(state for state in self.states if not state.agrees)


def measure(experiments: Sequence[Experiment] | None = None) -> VersionReport:
    """Run every experiment; process state is as before afterwards. UnsupportedTorch outside 2.11 to 2.15."""
    release = ti.torch_release()
    # torch 2.11 can crash when the first compile of a process runs in a thread that ends
    torch.compile(torch.neg, backend="eager")(torch.ones(1))
    chosen = EXPERIMENTS if experiments is None else experiments
    rows = tuple(StateReach(each.name, reach_of(each), each.expected(release)) for each in chosen)
    return VersionReport(torch.__version__, rows)


def reach_of(experiment: Experiment) -> Reach:
    """Write in a thread of its own; read there, in a plain thread, and in a copy of the writer's context."""
    rest = experiment.read()
    seen: dict[str, object] = {}

    def visit() -> None:
        seen["writer"] = experiment.read()
        copied = contextvars.copy_context()
        seen["plain"] = _in_thread(experiment.read)
        seen["copied"] = _in_thread(lambda: copied.run(experiment.read))

    _in_thread(lambda: experiment.write(visit))
    assert seen, f"the operation of {experiment.name!r} never came by"
    if seen["writer"] == rest:
        return Reach.UNWRITTEN
    if seen["plain"] == seen["writer"]:
        return Reach.PROCESS
    return Reach.CONTEXT if seen["copied"] == seen["writer"] else Reach.THREAD


def _in_thread(body: Callable[[], Any]) -> Any:
    """The body's result, from a new thread; its exception is raised here; RuntimeError after 60 s."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            results.append(body())
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    if not results:
        raise RuntimeError(f"expected an answer from a thread within {TIMEOUT_S:.0f} s, got none; see probes.stacks")
    return results[0]


def _trace(visit: Visit) -> None:
    def traced(x: Any) -> Any:
        visit()
        return x

    torch.fx.symbolic_trace(traced)


def _trace_before_dispatch(visit: Visit) -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        visit()
        return x + 1

    ti.resolve("fx.make_fx")(traced, pre_dispatch=True)(torch.ones(2))


def _compile(visit: Visit) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        visit()
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def _collect_metadata(visit: Visit) -> None:
    """AOTAutograd runs the function twice: to collect metadata, then to trace it; the visit is in the first run."""
    visits = iter([visit])

    def collected(x: torch.Tensor) -> torch.Tensor:
        next(visits, lambda: None)()
        return x + 1

    ti.resolve("aot.function")(collected, fw_compiler=lambda graph, inputs: graph)(torch.ones(2))


class _Visited(torch.nn.Module):
    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit = visit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.visit()
        return x + 1


def _export(visit: Visit) -> None:
    torch.export.export(_Visited(visit), (torch.ones(2),), strict=False)


def _set_dynamo_setting(visit: Visit) -> None:
    with ti.dynamo_config().patch(recompile_limit=77):
        visit()


def _set_inductor_setting(visit: Visit) -> None:
    with ti.inductor_config().patch(max_autotune_gemm_backends="ATEN"):
        visit()


def _annotate(visit: Visit) -> None:
    with ti.resolve("fx.annotate")({"probe": True}):
        visit()


def _set_stance(visit: Visit) -> None:
    with torch.compiler.set_stance("force_eager"):
        visit()


def _seed(visit: Visit) -> None:
    state = torch.random.get_rng_state()
    torch.manual_seed(20_240_601)
    visit()
    torch.random.set_rng_state(state)


def _set_default_dtype(visit: Visit) -> None:
    torch.set_default_dtype(torch.float64)
    visit()
    torch.set_default_dtype(torch.float32)


def _set_deterministic(visit: Visit) -> None:
    torch.use_deterministic_algorithms(True)
    visit()
    torch.use_deterministic_algorithms(False)


def _process(release: ti.Release) -> Reach:
    return Reach.PROCESS


def _flag(release: ti.Release) -> Reach:
    return Reach.PROCESS if release <= (2, 13) else Reach.THREAD


def _settings(release: ti.Release) -> Reach:
    return Reach.PROCESS if release <= (2, 11) else Reach.CONTEXT


def _compiling(release: ti.Release) -> Reach:
    return Reach.UNWRITTEN if release <= (2, 12) else Reach.PROCESS


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment("FX tracing flag, during a trace", _trace, ti.fx_flag, _flag),
    Experiment("nn.Module.__call__, during a trace", _trace, ti.module_call_is_original, _process),
    Experiment("nn.Module.__getattr__, during a trace", _trace, ti.module_getattr_is_original, _process),
    Experiment("current patcher, during a trace", _trace, lambda: ti.current_patcher() is not None, _process),
    Experiment("pre-dispatch modes, during a trace", _trace_before_dispatch, ti.pre_dispatch_mode_count, _process),
    Experiment("FX node annotations", _annotate, lambda: "custom" in ti.current_meta(), _process),
    Experiment("is_compiling(), during a dynamo compile", _compile, ti.compiling_flag, _compiling),
    Experiment("compile_lock, during a dynamo compile", _compile, lambda: ti.compile_lock_state().owner, _process),
    Experiment("FX code builder, during a dynamo compile", _compile, ti.forward_from_src_is_original, _process),
    Experiment(
        "torch.cuda.set_rng_state, during AOT metadata collection",
        _collect_metadata,
        ti.cuda_set_rng_state_is_original,
        _process,
    ),
    Experiment("is_exporting(), during an export", _export, ti.exporting_flag, _process),
    Experiment("stance", _set_stance, ti.stance, _process),
    Experiment("dynamo setting", _set_dynamo_setting, lambda: ti.dynamo_config().recompile_limit, _settings),
    Experiment(
        "inductor setting", _set_inductor_setting, lambda: ti.inductor_config().max_autotune_gemm_backends, _settings
    ),
    Experiment("torch random generator", _seed, lambda: ti.snapshot().rng_torch, _process),
    Experiment("default dtype", _set_default_dtype, torch.get_default_dtype, _process),
    Experiment("deterministic algorithms", _set_deterministic, torch.are_deterministic_algorithms_enabled, _process),
)


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = probe_parser(
        "versions",
        "Measure, with two threads, which compile and trace state of the installed torch reaches other threads; "
        "exit 1 where that differs from what is expected of this version.",
        "python -m probes.versions --json",
    )
    options = parser.parse_args(list(argv))
    report = measure()
    if options.json:
        print_json(report)
    else:
        _show(report)
    return FINDING if report.surprises else CLEAN


def _show(report: VersionReport) -> None:
    rows = table(f"torch {report.torch_version}", "state", "a write in one thread reaches", "expected")
    for state in report.states:
        expected = "the same" if state.agrees else state.expected.value
        rows.add_row(state.name, state.found.value, expected, style=None if state.agrees else "red")
    console().print(rows)


if __name__ == "__main__":
    run_command(main)
