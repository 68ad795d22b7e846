"""Isolated tracing: each effect with its negative control, every patch restored, autograd's threads let through."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate

from dflash.attention.gate import Gate
from dflash.attention.isolated import PROVED_ON, Isolated, backward_ahead, isolated_tracing
from dflash.errors import StrategyError
from probes.torch_internals import (
    RANDOM_FIELDS,
    available,
    differences,
    functorch_config,
    not_at_rest,
    resolve,
    snapshot,
)
from repro.fork import in_fork

release = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(release not in PROVED_ON, reason=f"isolated refuses torch {torch.__version__}")

PATIENCE_S = 20.0
REPLACED = ("fx.trace", "fx.make_fx_trace", "fx.patch_method", "hop.set_env")
REDIRECTED = ("fx.is_symbolic_tracing", "fx.is_tracing", "fx.annotate", "export.session", "compiler.session")


def torch_as_it_is() -> list[object]:
    """Each object and each code that isolation may change."""
    objects = [resolve(key) for key in REPLACED]
    inner = [resolve(key) for key in REDIRECTED if available(key)]
    inner += [torch.compiler.is_compiling, torch.compiler.is_exporting]
    return [*objects, *(getattr(function, "__wrapped__", function).__code__ for function in inner)]


class Held:
    """A place where one thread stops until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.leave = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.leave.wait(PATIENCE_S)


@contextmanager
def other_thread(program: Callable[[], object], held: Held) -> Iterator[None]:
    """Runs `program` in a thread up to where it is held; the rest of it after the block."""
    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    assert held.reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        held.leave.set()
        thread.join(PATIENCE_S)


def traced_until(held: Held) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        held.stop()
        return x + 1

    return function


def both_ways(work: Callable[[], object], **limits: float) -> tuple[object, object]:
    """What `work` gives without isolation and with it, each in a process of its own."""

    def plain() -> object:
        # torch 2.11's CUDA build crashes without a GPU when worker threads are the first to compile
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        return work()

    def isolated() -> object:
        with isolated_tracing(), backward_ahead():
            return plain()

    return in_fork(plain, **limits), in_fork(isolated, **limits)


def test_every_name_of_torch_is_as_before_after_the_last_scope_whatever_the_order_and_the_exceptions() -> None:
    before, state = torch_as_it_is(), snapshot()
    held = Held()

    def overlapping() -> None:
        with isolated_tracing():
            held.stop()

    with pytest.raises(ZeroDivisionError), isolated_tracing(), other_thread(overlapping, held):
        raise ZeroDivisionError
    assert torch_as_it_is() == before

    held = Held()
    outer = isolated_tracing()
    outer.__enter__()
    inside = torch_as_it_is()
    with other_thread(overlapping, held):
        outer.__exit__(None, None, None)
        assert torch_as_it_is() == inside  # the other thread's scope still needs it
    assert inside != before
    assert torch_as_it_is() == before
    assert not differences(state, snapshot(), ignore=RANDOM_FIELDS)


def test_a_warm_compiled_call_beside_a_trace_runs_its_compiled_code() -> None:
    def work() -> object:
        calls: list[int] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            return lambda *args: (calls.append(1), graph.forward(*args))[1]

        compiled = torch.compile(lambda x: x * 2, backend=backend)
        compiled(torch.ones(2))
        held = Held()
        with other_thread(lambda: make_fx(traced_until(held))(torch.ones(2)), held):
            try:
                return compiled(torch.ones(2)).tolist(), len(calls)
            except RuntimeError as error:
                return str(error)[:20]

    without, isolated = both_ways(work)
    assert isolated == ([2.0, 2.0], 2)
    assert without == ("Detected that you are"[:20] if release < (2, 14) else isolated)


def test_a_branch_inside_a_trace_gets_its_own_traces_decompositions_though_another_make_fx_began_meanwhile() -> None:
    """make_fx publishes its tracer for the process, and higher-order operators trace their branches with it."""

    def work() -> object:
        first, second, branches = Held(), Held(), []
        cosine_for_sine = {torch.ops.aten.sin.default: torch.cos}

        def branching(x: Tensor) -> Any:
            first.stop()
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

        def trace_branching() -> None:
            graph = make_fx(branching, cosine_for_sine, tracing_mode="symbolic")(torch.ones(3))
            branches.append([str(n.target) for n in graph.true_graph_0.graph.nodes if n.op == "call_function"])

        later = threading.Thread(target=lambda: make_fx(traced_until(second))(torch.ones(5)), daemon=True)
        with other_thread(trace_branching, first):
            later.start()
            second.reached.wait(1.0)  # under isolation it waits until the first trace has ended
        second.leave.set()
        later.join(PATIENCE_S)
        return branches

    without, isolated = both_ways(work)
    assert isolated == [["aten.cos.default"]]
    assert without == [["aten.sin.default"]]


def test_is_compiling_is_true_only_in_the_thread_that_compiles() -> None:
    def work() -> object:
        held, seen = Held(), []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            seen.append(torch.compiler.is_compiling())
            held.stop()
            return graph.forward

        with other_thread(lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)), held):
            seen.append(torch.compiler.is_compiling())
        return seen

    without, isolated = both_ways(work)
    at_compile = release >= (2, 13)
    assert isolated == [at_compile, False]
    assert without == [at_compile, at_compile]


def test_wrapping_a_function_during_another_threads_export_still_compiles_it() -> None:
    def work() -> object:
        held, ran = Held(), []

        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                held.stop()
                return x + 1

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
            ran.append(1)
            return graph.forward

        with other_thread(lambda: torch.export.export(Model(), (torch.ones(2),), strict=False), held):
            function = torch.compile(lambda x: x * 3, backend=backend)
        function(torch.ones(2))
        return len(ran)

    without, isolated = both_ways(work)
    assert (without, isolated) == (0, 1)


def test_an_annotation_reaches_the_traces_of_its_own_thread_and_no_others() -> None:
    def work() -> object:
        held = Held()

        def annotated() -> None:
            with annotate({"mine": 1}):
                held.stop()

        def marks() -> list[object]:
            with torch.fx.traceback.preserve_node_meta():
                graph = make_fx(lambda x: x + 1)(torch.ones(2)).graph
            return [node.meta.get("custom") for node in graph.nodes if node.op == "call_function"]

        with other_thread(annotated, held):
            beside = marks()
        with annotate({"own": 2}):
            own = marks()
        return beside, own, marks()

    without, isolated = both_ways(work)
    assert isolated == ([None], [{"own": 2}], [None])
    assert without == ([{"mine": 1}], [{"own": 2}], [None])


@pytest.mark.parametrize(("handed_on", "ends"), [("yes", True), ("no", False)])
def test_a_trace_inside_a_trace_passes_in_autograds_own_thread_instead_of_waiting_for_the_lock(
    handed_on: str, ends: bool
) -> None:
    """In a process of its own: autograd's threads do not survive a fork."""
    command = [sys.executable, "-m", "tests.attention.deep_backward", handed_on]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2])
    assert (done.returncode == 0) == ends, done.stderr
    assert ("2 threads" in done.stdout) == ends
    assert ("Timeout (0:00:15)!" in done.stderr) != ends


def test_the_backward_is_compiled_ahead_in_the_calling_thread_and_the_setting_is_restored() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def compiled_when(scope: Callable[[], AbstractContextManager[None]]) -> list[str]:
        order: list[str] = []

        def noting(name: str) -> Callable[[torch.fx.GraphModule, object], torch.fx.GraphModule]:
            return lambda graph, _: (order.append(name), graph)[1]

        backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"))
        x = torch.ones(3, requires_grad=True)
        with scope():
            out = torch.compile(lambda y: y.sin(), backend=backend)(x)
            order.append("called")
            out.sum().backward()
        return order

    before = functorch_config().force_non_lazy_backward_lowering
    assert compiled_when(nullcontext) == ["forward", "called", "backward"]
    assert compiled_when(backward_ahead) == ["forward", "backward", "called"]
    assert functorch_config().force_non_lazy_backward_lowering is before


def test_an_unproved_torch_is_refused_by_name_and_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_as_it_is()
    refused = r"2\.11, 2\.13, 2\.14.*got 2\.12\.1\+cpu.*locked-compile"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.12.1+cpu")
        with pytest.raises(StrategyError, match=refused), isolated_tracing():
            pass
        with pytest.raises(StrategyError, match=refused):
            Isolated()
    assert torch_as_it_is() == before


def test_isolation_does_not_begin_in_the_middle_of_a_trace() -> None:
    before, held = torch_as_it_is(), Held()
    with other_thread(lambda: torch.fx.symbolic_trace(traced_until(held)), held):
        with pytest.raises(StrategyError, match="expected no trace in progress"), isolated_tracing():
            pass
        assert torch_as_it_is() == before
    assert not not_at_rest(snapshot())


def test_a_trace_that_raises_leaves_nothing_behind_and_lets_the_next_one_in() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with isolated_tracing():
        with pytest.raises(ZeroDivisionError):
            make_fx(fail)(torch.ones(2))
        thread = threading.Thread(target=lambda: make_fx(lambda x: x + 1)(torch.ones(2)), daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not not_at_rest(snapshot())


def test_two_isolated_strategies_with_gates_of_their_own_share_the_patches_and_restore_them_once() -> None:
    before = torch_as_it_is()
    one, two = Isolated(Gate()), Isolated(Gate())
    with one.thread_scope():
        with two.thread_scope(), one.step_scope("k"), two.step_scope("k"):
            patched = torch_as_it_is()
        assert torch_as_it_is() == patched
    assert torch_as_it_is() == before
