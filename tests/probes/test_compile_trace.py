"""probes.compile_trace: the time line of a program that overlaps and of one that does not, and the file it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from probes import compile_trace
from probes.command_line import UsageProblem
from probes.torch_internals import torch_release


@pytest.fixture
def traced(call_runs: Any) -> Any:
    """What compile_trace reported of the program `trace`, faulty and clean."""
    return {mode: call_runs(mode, "trace")["trace"]["report"] for mode in ("faulty", "clean")}


def test_a_warm_call_inside_another_threads_trace_is_the_finding_and_only_then(traced: Any) -> None:
    report = traced["faulty"]
    assert report["finding"]
    (overlap,) = report["overlaps"]
    assert (overlap["outer_thread"], overlap["outer"]) == ("T1", "FX trace")
    assert (overlap["inner_thread"], overlap["inner"]) == ("MainThread", "warm call")
    first, last = overlap["outer_ms"]
    assert first <= overlap["inner_ms"] <= last
    assert (traced["clean"]["finding"], traced["clean"]["overlaps"]) == (False, [])


def test_the_state_that_a_trace_wrote_is_named_and_seen_restored(traced: Any) -> None:
    changes = [(c["name"], c["before"], c["after"]) for c in traced["clean"]["state_changes"]]
    for name in ("FX patcher", "nn.Module.__call__ patched"):
        assert (name, "False", "True") in changes
        assert (name, "True", "False") in changes


def test_the_file_has_the_true_pid_and_a_named_track_for_each_thread(traced: Any) -> None:
    events = traced["faulty"]["events"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"MainThread", "T1"}
    assert len({e["pid"] for e in events}) == 1
    intervals = [e for e in events if e["ph"] == "X"]
    assert {names[e["tid"]] for e in intervals if e["cat"] == "FX trace"} == {"T1"}
    assert next(e["pid"] for e in intervals) in names, "the main thread's id is the process's on Linux"
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in intervals)


def test_intervals_of_one_thread_nest(traced: Any) -> None:
    events = [e for e in traced["clean"]["events"] if e["ph"] == "X"]
    for tid in {e["tid"] for e in events}:
        open_until: list[float] = []
        for e in (e for e in events if e["tid"] == tid):
            while open_until and open_until[-1] <= e["ts"]:
                open_until.pop()
            assert not open_until or e["ts"] + e["dur"] <= open_until[-1] + 0.01, e["name"]
            open_until.append(e["ts"] + e["dur"])


def test_waits_for_compile_lock_and_aot_stages_are_intervals_of_the_thread_that_waited(call_runs: Any) -> None:
    report = call_runs("faulty", "trace")["lock"]["report"]
    kinds = {(thread, kind) for thread, kind, _, _ in report["totals_ms"]}
    assert {("MainThread", "wait for compile_lock"), ("MainThread", "AOT"), ("T1", "dynamo")} <= kinds
    wait = next(e for e in report["events"] if e.get("cat") == "wait for compile_lock")
    assert wait["args"]["owner"] == "T1"
    assert "wait for compile_lock" not in str(call_runs("clean", "trace")["lock"]["report"]["totals_ms"])


@pytest.mark.skipif(torch_release() < (2, 13), reason="create_block_mask annotates from torch 2.13")
def test_a_compile_inside_another_threads_mask_annotation_is_the_finding_and_only_then(call_runs: Any) -> None:
    report = call_runs("faulty", "trace")["annotation"]["report"]
    assert report["finding"]
    assert ("T1", "mask annotation", "MainThread", "dynamo") in {
        (o["outer_thread"], o["outer"], o["inner_thread"], o["inner"]) for o in report["overlaps"]
    }
    clean = call_runs("clean", "trace")["annotation"]["report"]
    assert (clean["finding"], clean["overlaps"]) == (False, [])


@pytest.mark.parametrize("mode", ["faulty", "clean"])
def test_programs_print_the_same_with_and_without_the_time_line(call_runs: Any, mode: str) -> None:
    traced, alone = call_runs(mode, "trace"), call_runs(mode, "alone")
    assert {n: run["printed"] for n, run in traced.items()} == {n: run["printed"] for n, run in alone.items()}


def test_the_command_writes_the_file_and_reports_a_program_that_fails(tmp_path: Path, capsys: Any) -> None:
    script, path = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text("import torch\ntorch.fx.symbolic_trace(lambda x: x)\nraise SystemExit(3)")
    assert compile_trace.main(["--json", "-o", str(path), "--", str(script)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["threads"]
    assert any(event.get("cat") == "FX trace" for event in json.loads(path.read_text())["traceEvents"])


def test_calls_are_cold_once_then_warm() -> None:
    with compile_trace.trace() as tracing:
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2))
    counts = {kind: count for _, kind, count, _ in tracing.result.totals_ms}
    assert (counts["cold call"], counts["warm call"]) == (1, 2)
    assert not tracing.result.finding


def test_an_output_that_cannot_be_written_is_refused_before_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for output, said in ((tmp_path / "no" / "trace.json", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(UsageProblem, match=said):
            compile_trace.main(["-o", str(output), "--", str(script)])
    monkeypatch.setattr(compile_trace.os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(UsageProblem, match="can be written"):
        compile_trace.main(["-o", str(tmp_path / "trace.json"), "--", str(script)])
