"""probes.compile_trace: the time line of a program that overlaps and of one that does not, and the file it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from probes import compile_trace

PROGRAMS = Path(__file__).with_name("call_programs.py")


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "probes.compile_trace", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Report and trace file of the program `trace`, faulty and clean."""
    found = {}
    for mode in ("faulty", "clean"):
        path = tmp_path_factory.mktemp(mode) / "trace.json"
        done = probe("--json", "-o", str(path), "--", str(PROGRAMS), "trace", mode)
        found[mode] = (done.returncode, json.loads(done.stdout.splitlines()[-1]), json.loads(path.read_text()))
    return found


def test_a_warm_call_inside_another_threads_trace_is_the_finding_and_only_then(traced: Any) -> None:
    code, report, _ = traced["faulty"]
    assert code == 1
    (overlap,) = report["overlaps"]
    assert (overlap["outer_thread"], overlap["outer"]) == ("T1", "FX trace")
    assert (overlap["inner_thread"], overlap["inner"]) == ("MainThread", "warm call")
    first, last = overlap["outer_ms"]
    assert first <= overlap["inner_ms"] <= last
    code, report, _ = traced["clean"]
    assert (code, report["overlaps"]) == (0, [])


def test_the_state_that_a_trace_wrote_is_named_and_seen_restored(traced: Any) -> None:
    changes = [(c["name"], c["before"], c["after"]) for c in traced["clean"][1]["state_changes"]]
    for name in ("FX patcher", "nn.Module.__call__ patched"):
        assert (name, "False", "True") in changes
        assert (name, "True", "False") in changes


def test_the_file_has_the_true_pid_and_a_named_track_for_each_thread(traced: Any) -> None:
    events = traced["faulty"][2]["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"MainThread", "T1"}
    assert len({e["pid"] for e in events}) == 1
    intervals = [e for e in events if e["ph"] == "X"]
    assert {names[e["tid"]] for e in intervals if e["cat"] == "FX trace"} == {"T1"}
    assert next(e["pid"] for e in intervals) in names, "the main thread's id is the process's on Linux"
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in intervals)


def test_intervals_of_one_thread_nest(traced: Any) -> None:
    events = [e for e in traced["clean"][2]["traceEvents"] if e["ph"] == "X"]
    for tid in {e["tid"] for e in events}:
        open_until: list[float] = []
        for e in (e for e in events if e["tid"] == tid):
            while open_until and open_until[-1] <= e["ts"]:
                open_until.pop()
            assert not open_until or e["ts"] + e["dur"] <= open_until[-1] + 0.01, e["name"]
            open_until.append(e["ts"] + e["dur"])


def test_waits_for_compile_lock_and_aot_stages_are_intervals_of_the_thread_that_waited(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = probe("--json", "-o", str(path), "--", str(PROGRAMS), "lock", "faulty")
    report = json.loads(done.stdout.splitlines()[-1])
    kinds = {(thread, kind) for thread, kind, _, _ in report["totals_ms"]}
    assert {("MainThread", "wait for compile_lock"), ("MainThread", "AOT"), ("T1", "dynamo")} <= kinds
    wait = next(e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "wait for compile_lock")
    assert wait["args"]["owner"] == "T1"


def test_calls_are_cold_once_then_warm() -> None:
    with compile_trace.trace() as tracing:
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2))
    counts = {kind: count for _, kind, count, _ in tracing.result.totals_ms}
    assert (counts["cold call"], counts["warm call"]) == (1, 2)
    assert not tracing.result.finding


def test_a_missing_output_folder_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = probe("-o", str(tmp_path / "no" / "trace.json"), "--", str(PROGRAMS), "trace", "clean")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1)
