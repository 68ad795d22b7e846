"""probes.compiled_calls: each way of not running compiled, beside the same program without the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from probes import compiled_calls
from probes.torch_internals import fx_flag_is_per_thread, torch_release

PROGRAMS = Path(__file__).with_name("call_programs.py")


def child(*command: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(PROGRAMS.parents[2])  # a script's own folder is on its path, the repository is not
    env = (
        os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        | ({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {})
    )
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=200, check=False)


def probe(script: Path, *arguments: str, cache: Path | None = None) -> tuple[int, dict[str, Any], str]:
    done = child("-m", "probes.compiled_calls", "--json", "--", str(script), *arguments, cache=cache)
    *printed, report = done.stdout.strip().splitlines()
    return done.returncode, json.loads(report), "\n".join(printed)


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


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Every program of call_programs, faulty and clean, watched and alone: four children for the whole module."""
    found = {}
    for mode in ("faulty", "clean"):
        for watched in ("watched", "alone"):
            done = child(str(PROGRAMS), "all", mode, watched)
            assert done.returncode == 0, done.stderr
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            found[mode, watched] = {line["name"]: line for line in lines}
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_that_did_not_run_compiled_are_found_with_their_reason_and_only_then(runs: Any, name: str) -> None:
    if name in ("trace", "silent") and fx_flag_is_per_thread():
        pytest.skip("the FX flag is thread-local from torch 2.14")
    report = runs["faulty", "watched"][name]["report"]
    assert report["finding"]
    assert EXPECTED[name] in reasons(report)
    clean = runs["clean", "watched"][name]["report"]
    assert (clean["finding"], reasons(clean)) == (False, "")


@pytest.mark.parametrize("mode", ["faulty", "clean"])
def test_programs_print_the_same_with_and_without_the_probe(runs: Any, mode: str) -> None:
    watched, alone = runs[mode, "watched"], runs[mode, "alone"]
    assert len(alone) == 8
    assert {n: run["printed"] for n, run in watched.items()} == {n: run["printed"] for n, run in alone.items()}


@pytest.mark.parametrize("name", ["trace", "stance"])
def test_the_thread_to_blame_is_named(runs: Any, name: str) -> None:
    if name == "trace" and fx_flag_is_per_thread():
        pytest.skip("the FX flag is thread-local from torch 2.14")
    report = runs["faulty", "watched"][name]["report"]
    blamed = [b for f in report["functions"] for r in (*f["uncompiled"], *f["raised"]) for b in r["blamed"]]
    assert blamed == ["T1"]


@pytest.mark.skipif(torch_release() < (2, 13), reason="is_compiling is set for dynamo compiles from torch 2.13")
def test_a_branch_decided_by_another_threads_compile_is_a_leak(runs: Any) -> None:
    run = runs["faulty", "watched"]["branch"]
    assert run["printed"] == "other path\n"
    assert "is_compiling()" in run["report"]["leaks"][0]["what"]
    assert "branch" in run["report"]["leaks"][0]["where"]
    clean = runs["clean", "watched"]["branch"]
    assert (clean["printed"], clean["report"]["leaks"]) == ("plain path\n", [])


def test_torch_compile_that_returns_the_function_itself_is_a_leak(runs: Any) -> None:
    leaks = runs["faulty", "watched"]["export"]["report"]["leaks"]
    assert any("torch.compile returned the function itself" in leak["what"] for leak in leaks)
    assert runs["clean", "watched"]["export"]["report"]["leaks"] == []


@pytest.mark.skipif(torch_release() < (2, 12), reason="torch 2.11 has no fallback_to_eager annotation")
def test_code_degraded_by_another_threads_annotation_is_found_and_again_when_the_cache_serves_it(
    tmp_path: Path,
) -> None:
    script = PROGRAMS.with_name("cache_programs.py")
    code, report, printed = probe(script, "poison", cache=tmp_path)
    assert code == 1
    assert report["degraded"][0]["cause"] == "annotated by mask builder"
    assert set(report["degraded"][0]["ops"]) == {"aten::sin.default", "aten::mul.Tensor", "aten::add.Tensor"}
    code, report, again = probe(script, "clean", cache=tmp_path)
    assert code == 1
    assert "on-disk cache" in report["degraded"][0]["cause"]
    assert again == printed.splitlines()[-1]
    code, report, whole = probe(script, "clean", cache=tmp_path / "other")
    assert (code, report["degraded"], whole) == (0, [], again)


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


def test_a_missing_script_is_one_line_and_exit_2() -> None:
    done = child("-m", "probes.compiled_calls", "--", "missing.py")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
