"""`dflash bench strategies`: each strategy in a process of its own with empty caches: does it live, and how fast."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from dflash.attention.base import Scope
from dflash.attention.select import STRATEGIES
from dflash.attention.unguarded import Unguarded
from dflash.bench.strategy_child import Measured
from dflash.bench.strategy_workload import Job, Size
from dflash.errors import ConfigError, OutputError

# seconds that importing torch may take on a busy machine; a child's limit counts from the end of its imports
START_S = 60.0
# seconds past its own limit that a child gets to look at its stacks and say what it saw
GRACE_S = 15.0
HELP = """\
Measure every attention strategy: one process each, empty compile caches, a time limit.

examples:
  dflash bench strategies
  dflash bench strategies --threads 3 --json strategies.json --plot strategies.png
  dflash bench strategies --device cuda --tokens 3072 --blocks 512 --block-size 16 --strategies isolated locked-compile
"""


@dataclass(frozen=True)
class StrategiesBench:
    """Forward and backward of drafters by several threads on one device, under each strategy."""

    # threads that train at the same time, each a drafter of its own
    threads: int = 3
    # attention kernel of the compiled strategies and of eager; auto: flex on CUDA, sdpa on a CPU
    kernel: Literal["auto", "flex", "sdpa"] = "auto"
    # what the compiled strategies compile: attention alone, or each layer as a whole
    scope: Scope = "attention"
    # cpu, cuda, cuda:N, or auto (cuda when there is one)
    device: str = "auto"
    # context tokens of the longest row; 0: 2000 on CUDA, 512 on a CPU
    tokens: int = 0
    # blocks a row; 0: 64 on CUDA, 16 on a CPU
    blocks: int = 0
    # tokens a block; 0: 32 on CUDA, 8 on a CPU
    block_size: int = 0
    # different row lengths, each compiled on its own
    shapes: int = 2
    # timed steps a thread
    steps: int = 30
    # strategies measured, and "unguarded": torch.compile with nothing round it; empty: all
    strategies: tuple[str, ...] = ()
    # seconds a strategy may take, its process's start not counted
    limit_s: float = 90.0
    # file for the figures
    json: Path | None = None
    # picture of them (needs the extra `plot`)
    plot: Path | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table: a strategy and how many threads."""

    strategy: str
    threads: int


def bench_strategies(options: StrategiesBench, console: Console) -> list[dict[str, Any]]:
    """Measures one case after the other; errors of the options come before the first."""
    _check(options)
    device = _device(options.device)
    results = []
    for case in _cases(options):
        console.print(f"measuring {case.strategy}, {case.threads} thread(s), at most {options.limit_s:.0f} s")
        result = run_case(_job(options, case, device))
        console.print(f"  {described(result)}")
        results.append(result)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot is not None:
        from dflash.bench.strategy_plot import plot

        plot(results, options.plot)
    console.print(table(results, options, device))
    return results


def _check(options: StrategiesBench) -> None:
    known = [Unguarded.name, *STRATEGIES]
    for name in options.strategies:
        if name not in known:
            raise ConfigError(f"strategies among {', '.join(known)}", name, "choose one of them", where="--strategies")
    for name in ("threads", "shapes", "steps"):
        if getattr(options, name) < 1:
            raise ConfigError("at least 1", str(getattr(options, name)), "raise it", where=f"--{name}")
    if options.kernel == "flex" and _device(options.device).type == "cpu":
        raise ConfigError("a CUDA device for flex's backward", "cpu", "use --kernel sdpa", where="--kernel")
    for path in (options.json, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise OutputError("a file in a directory that exists", str(path), "create the directory first")
    if options.plot is not None:
        from dflash.bench.strategy_plot import require_matplotlib

        require_matplotlib()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("a device of this machine", name, "use --device cpu", where="--device")
    return device


def _cases(options: StrategiesBench) -> Iterator[Case]:
    """The single thread first: what the others are measured against."""
    names = options.strategies or (Unguarded.name, *STRATEGIES)
    if Unguarded.name in names and options.threads > 1:
        yield Case(Unguarded.name, 1)
    yield from (Case(name, options.threads) for name in names)


def _job(options: StrategiesBench, case: Case, device: torch.device) -> Job:
    kernel = options.kernel if options.kernel != "auto" else ("flex" if device.type == "cuda" else "sdpa")
    big = device.type == "cuda"
    size = Size(
        tokens=options.tokens or (2000 if big else 512),
        blocks=options.blocks or (64 if big else 16),
        block_size=options.block_size or (32 if big else 8),
        layers=5 if big else 2,
        heads=32 if big else 4,
        kv_heads=8 if big else 2,
        head_dim=128 if big else 32,
        width=2048 if big else 128,
        shapes=options.shapes,
    )
    return Job(case.strategy, kernel, options.scope, case.threads, str(device), size, options.steps, options.limit_s)


def run_case(job: Job, arguments: Sequence[str] = ("-m", "dflash.bench.strategy_child")) -> dict[str, Any]:
    """Measures one job in a child; a crash, or a hang that no longer answers, is a result like any other."""
    with _empty_caches() as environment:
        command = [sys.executable, *arguments, json.dumps(asdict(job))]
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, errors = child.communicate(timeout=job.limit_s + START_S + GRACE_S)
        except subprocess.TimeoutExpired:
            # the whole session: inductor's helper processes outlive their parent otherwise
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return asdict(Measured(asdict(job), outcome="hung", detail="the process no longer answered"))
    return _result(job, child.returncode, out, errors)


def _result(job: Job, code: int, out: str, errors: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    if code == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = (errors.strip().splitlines() or ["no message"])[-1][:300]
    detail = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {last}"
    return asdict(Measured(asdict(job), outcome="crashed", detail=detail))


@contextmanager
def _empty_caches() -> Iterator[dict[str, str]]:
    """An environment whose compile caches are new and go away."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-", ignore_cleanup_errors=True) as directory:
        yield {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(directory) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(directory) / "triton"),
        }


def described(result: dict[str, Any]) -> str:
    """The outcome in words: ok / 3 of 90 steps failed / hung / crashed."""
    if result["outcome"] == "failed":
        return f"{result['failed_steps']} of {result['steps']} steps failed ({result['detail']})"
    detail = f" ({result['detail']})" if result["detail"] else ""
    return f"{result['outcome']}{detail}"


def table(results: Sequence[dict[str, Any]], options: StrategiesBench, device: torch.device) -> Table:
    """One row a case; the share is of the unguarded run with as many threads, where that one lived."""
    job = results[0]["job"]
    size, version = job["size"], results[0]["torch"]
    shape = f"S={size['tokens']}, {size['blocks']} blocks of {size['block_size']}, {size['layers']} layers"
    made = Table(
        title=f"torch {version}, {device}, kernel {job['kernel']}, compiled {job['scope']}, {shape}, "
        f"{size['shapes']} row lengths, {options.steps} timed steps a thread"
    )
    for title in ("strategy", "threads", "outcome"):
        made.add_column(title, overflow="fold")
    for title in (
        "first step s",
        "cold total s",
        "Ktok/s",
        "of unguarded",
        "peak MB",
        "compiled calls",
        "late recompiles",
    ):
        made.add_column(title, justify="right")
    base = next((r["steady_ktok_s"] for r in results if _is_base(r, options.threads)), None)
    for result in results:
        made.add_row(*_cells(result, base))
    return made


def _is_base(result: dict[str, Any], threads: int) -> bool:
    return (result["job"]["strategy"], result["job"]["threads"], result["outcome"]) == (Unguarded.name, threads, "ok")


def _cells(result: dict[str, Any], base_ktok_s: float | None) -> list[str]:
    speed, calls = result["steady_ktok_s"], result["compiled_calls"]
    share = f"{speed / base_ktok_s:.2f}" if speed and base_ktok_s else "-"
    return [
        result["job"]["strategy"],
        str(result["job"]["threads"]),
        described(result),
        _number(result["first_step_s"], ".1f"),
        _number(result["cold_total_s"], ".1f"),
        _number(speed, ".2f"),
        share,
        _number(result["peak_mb"], ".0f"),
        "-" if calls is None else f"{calls}/{result['expected_calls']}",
        _number(result["late_recompiles"], "d"),
    ]


def _number(value: float | int | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(words: list[str], parse: Callable[..., StrategiesBench] | None = None) -> int:
    """The verb; exit code 0 once everything was measured, whatever was found."""
    from dflash.command_line import parse_required

    options = (parse or parse_required)(StrategiesBench, words, prog="dflash bench strategies", description=HELP)
    width = None if sys.stdout.isatty() else 200
    bench_strategies(options, Console(file=sys.stdout, highlight=False, width=width))
    return 0
