"""The strategies bench: every way a child can end is a row; bad options stop it before anything is measured."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dflash.bench import strategies, strategy_child
from dflash.bench.strategies import StrategiesBench, bench_strategies, described, main, run_case, table
from dflash.bench.strategy_child import measure
from dflash.bench.strategy_workload import Job, Size, Worker
from dflash.errors import ConfigError, OutputError

TINY = Size(tokens=144, blocks=2, block_size=2, layers=1, heads=2, kv_heads=1, head_dim=8, width=16, shapes=2)


def job(strategy: str = "sdpa", threads: int = 2, limit_s: float = 60.0) -> Job:
    return Job(strategy, "sdpa", "attention", threads, "cpu", TINY, steps=3, limit_s=limit_s)


def lines(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def memory_console() -> Console:
    import io

    return Console(file=io.StringIO(), width=200)


def test_a_child_measures_every_step_of_every_thread_and_compiles_nothing_under_an_uncompiled_strategy() -> None:
    found = run_case(job())
    assert described(found) == "ok"
    assert found["steps"] == 2 * (TINY.shapes + 3)
    assert (found["compiled_calls"], found["expected_calls"], found["late_recompiles"]) == (0, 0, 0)
    assert 0 < found["first_step_s"] <= found["cold_total_s"]
    assert found["steady_ktok_s"] > 0
    assert found["peak_mb"] > 1


def test_compiled_code_runs_as_often_as_the_timed_steps_call_it() -> None:
    found = measure(job("locked-compile", threads=2))
    assert found.outcome == "ok"
    assert found.compiled_calls == found.expected_calls == 2 * TINY.layers * 3 * 2
    assert found.late_recompiles == 0


def test_failed_steps_are_counted_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Worker.step, []

    def every_fourth_fails(worker: Worker, shape: int) -> int:
        calls.append(shape)
        if len(calls) % 4 == 0:
            raise RuntimeError("a message\nof two lines")
        return real(worker, shape)

    monkeypatch.setattr(Worker, "step", every_fourth_fails)
    found = measure(job(threads=1, strategy="sdpa"))
    assert (found.outcome, found.steps, found.failed_steps) == ("failed", 5, 1)
    assert described(vars(found)) == "1 of 5 steps failed (RuntimeError: a message of two lines)"


def test_a_thread_that_never_ends_makes_the_outcome_hung_with_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()
    monkeypatch.setattr(Worker, "step", lambda worker, shape: leave.wait(60) and 0)
    monkeypatch.setattr(strategy_child, "LOOK_S", 0.1)
    found = measure(job(limit_s=0.5))
    leave.set()
    assert found.outcome == "hung"
    assert "none" in found.detail  # nothing of torch is stuck: the verdict says so instead of guessing
    assert found.steady_ktok_s is None


def test_a_crash_a_failed_start_and_a_silent_child_are_outcomes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert described(run_case(job(), ("-c", "import os; os.abort()"))) == "crashed (signal SIGABRT)"
    refused = described(run_case(job(), ("-c", "raise SystemExit('no such device')")))
    assert refused == "crashed (exit code 1: no such device)"
    monkeypatch.setattr(strategies, "START_S", 0.5)
    monkeypatch.setattr(strategies, "GRACE_S", 0.0)
    silent = run_case(job(limit_s=0.5), ("-c", "import time; time.sleep(60)"))
    assert described(silent) == "hung (the process no longer answered)"


def test_each_child_has_empty_caches_of_its_own_that_are_gone_afterwards() -> None:
    program = (
        "import json, os; paths = [os.environ[k] for k in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')]; "
        "print(json.dumps({'paths': paths, 'empty': not any(map(os.path.exists, paths))}))"
    )
    one, two = run_case(job(), ("-c", program)), run_case(job(), ("-c", program))
    assert one["empty"]
    assert two["empty"]
    assert not set(one["paths"]) & set(two["paths"])
    assert not any(Path(path).parent.exists() for path in [*one["paths"], *two["paths"]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "lockedcompile"], "expected strategies among unguarded, eager, .*got lockedcompile"),
        (["--kernel", "flex", "--device", "cpu"], "expected a CUDA device for flex's backward, got cpu"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--strategys", "sdpa"], "--strategies"),
    ],
)
def test_bad_options_are_one_line_and_nothing_is_measured(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "run_case", lambda job: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=message):
        main(words)


def test_a_file_in_no_directory_and_a_picture_without_matplotlib_are_refused_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(strategies, "run_case", lambda job: pytest.fail("measured"))
    with pytest.raises(OutputError, match="expected a file in a directory that exists"):
        main(["--json", str(tmp_path / "no" / "figures.json")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"--plot: expected matplotlib, got none installed; pip install 'dflash\[plot\]'"
    ):
        main(["--plot", str(tmp_path / "picture.png")])


def made_up(job: Job) -> dict[str, Any]:
    found = vars(strategy_child.Measured(strategy_child.asdict(job)))
    if job.strategy == "eager":
        return found | {"outcome": "failed", "detail": "RuntimeError: x", "steps": 60, "failed_steps": 3}
    speed = 10.0 if job.strategy == "unguarded" else 9.5
    return found | {"steady_ktok_s": speed, "cold_total_s": 2.0, "compiled_calls": 12, "expected_calls": 12}


def test_the_table_comes_last_and_json_has_the_same_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(strategies, "run_case", made_up)
    console, path = memory_console(), tmp_path / "figures.json"
    chosen = ("unguarded", "eager", "locked-compile")
    results = bench_strategies(StrategiesBench(strategies=chosen, json=path, device="cpu"), console)
    assert [(r["job"]["strategy"], r["job"]["threads"]) for r in results] == [
        ("unguarded", 1),
        ("unguarded", 3),
        ("eager", 3),
        ("locked-compile", 3),
    ]
    assert json.loads(path.read_text()) == results
    shown = lines(console)
    assert "3 of 60 steps failed" in shown
    assert shown.rstrip().splitlines()[-2].split("│")[1:3] == [" locked-compile ", " 3       "]
    assert "0.95" in shown.splitlines()[-2]
    assert torch.__version__ in shown


def test_the_picture_is_written_in_the_format_of_its_ending(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dflash.bench.strategy_plot import plot

    results = [made_up(job(name)) for name in ("unguarded", "eager")]
    plot(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert table(results, StrategiesBench(threads=2), torch.device("cpu")).row_count == 2
