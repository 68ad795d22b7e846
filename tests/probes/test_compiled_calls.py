"""probes.compiled_calls: each way of not running compiled, beside the same program without the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from probes import compiled_calls
from probes.torch_internals import fx_flag_is_per_thread, torch_release


def reasons(report: dict[str, Any]) -> str:
    functions = report["functions"]
    return "; ".join(reason["reason"] for f in functions for reason in (*f["uncompiled"], *f["raised"]))


EXPECTED = {
    "trace": "refused: an FX trace is in progress elsewhere",
    "silent": "error_on_nested_fx_trace is off",
    "stance": "stance force_eager",
    "limit": "recompile limit",
    "suppressed": "error suppressed",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_that_did_not_run_compiled_are_found_with_their_reason_and_only_then(call_runs: Any, name: str) -> None:
    if name in ("trace", "silent") and fx_flag_is_per_thread():
        pytest.skip("the FX flag is thread-local from torch 2.14")
    report = call_runs("faulty", "calls")[name]["report"]
    assert report["finding"]
    assert EXPECTED[name] in reasons(report)
    clean = call_runs("clean", "calls")[name]["report"]
    assert (clean["finding"], reasons(clean)) == (False, "")


@pytest.mark.parametrize("mode", ["faulty", "clean"])
def test_programs_print_the_same_with_and_without_the_probe(call_runs: Any, mode: str) -> None:
    watched, alone = call_runs(mode, "calls"), call_runs(mode, "alone")
    assert len(alone) == 9
    assert {n: run["printed"] for n, run in watched.items()} == {n: run["printed"] for n, run in alone.items()}


@pytest.mark.parametrize("name", ["trace", "stance"])
def test_the_thread_to_blame_is_named(call_runs: Any, name: str) -> None:
    if name == "trace" and fx_flag_is_per_thread():
        pytest.skip("the FX flag is thread-local from torch 2.14")
    report = call_runs("faulty", "calls")[name]["report"]
    blamed = [b for f in report["functions"] for r in (*f["uncompiled"], *f["raised"]) for b in r["blamed"]]
    assert blamed == ["T1"]


@pytest.mark.skipif(torch_release() < (2, 13), reason="is_compiling is set for dynamo compiles from torch 2.13")
def test_a_branch_decided_by_another_threads_compile_is_a_leak(call_runs: Any) -> None:
    run = call_runs("faulty", "calls")["branch"]
    assert run["printed"] == "other path\n"
    assert "is_compiling()" in run["report"]["leaks"][0]["what"]
    assert "branch" in run["report"]["leaks"][0]["where"]
    clean = call_runs("clean", "calls")["branch"]
    assert (clean["printed"], clean["report"]["leaks"]) == ("plain path\n", [])


def test_torch_compile_that_returns_the_function_itself_is_a_leak(call_runs: Any) -> None:
    leaks = call_runs("faulty", "calls")["export"]["report"]["leaks"]
    assert any("torch.compile returned the function itself" in leak["what"] for leak in leaks)
    assert call_runs("clean", "calls")["export"]["report"]["leaks"] == []


@pytest.mark.skipif(torch_release() < (2, 12), reason="torch 2.11 has no fallback_to_eager annotation")
def test_code_degraded_by_another_threads_annotation_is_found_and_again_when_the_cache_serves_it(
    poisoning: dict[str, Any],
) -> None:
    code, _, report = poisoning["first"]
    assert code == 1
    assert report["degraded"][0]["cause"] == "annotated by mask builder"
    assert set(report["degraded"][0]["ops"]) == {"aten::sin.default", "aten::mul.Tensor", "aten::add.Tensor"}
    code, _, report = poisoning["served"]
    assert code == 1
    assert "on-disk cache" in report["degraded"][0]["cause"]


def test_recompiles_carry_their_reason() -> None:
    with compiled_calls.watch() as watching:
        compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        for size in (2, 3, 3):
            compiled(torch.ones(size))
    (report,) = watching.result.functions
    assert (report.calls, report.ran_compiled, report.compiles) == (3, 3, 2)
    assert "size mismatch" in report.recompiles[0]
    assert not watching.result.finding


def test_all_hooks_go_when_the_block_raises_and_the_callable_works_on() -> None:
    from probes.overhead import _HOOKED
    from probes.torch_internals import resolve

    resolve("dynamo.patch_torch")()
    before = {key: resolve(key) for key in _HOOKED}
    codes = torch.compile.__code__, torch.compiler.is_compiling.__code__
    compiled = None

    def block() -> None:
        nonlocal compiled
        with compiled_calls.watch():
            compiled = torch.compile(lambda x: x + 2, backend="eager")
            compiled(torch.ones(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert {key: resolve(key) for key in _HOOKED} == before
    assert (torch.compile.__code__, torch.compiler.is_compiling.__code__) == codes
    assert compiled is not None
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]


def test_a_second_watch_raises() -> None:
    with compiled_calls.watch(), pytest.raises(RuntimeError, match="one recorder"), compiled_calls.watch():
        pass
