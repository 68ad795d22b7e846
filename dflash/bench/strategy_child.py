"""The measured process of `dflash bench strategies`: one strategy, threads, a time limit; a line of JSON at the end."""

import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from dflash.attention.compile_watch import newest_compiles
from dflash.attention.compiled_calls import Count, counted_compiled_calls
from dflash.bench.strategy_workload import UNCOMPILED, Job, Size, Worker, make_workers
from probes.stack_sources import own_dump, sample
from probes.stacks import analyse
from probes.torch_internals import compile_lock_state, resolve

# seconds between the three looks at the stacks of a process that is past its limit
LOOK_S = 2.0
Outcome = Literal["ok", "failed", "hung", "crashed"]


@dataclass
class Measured:
    """What one child found; None where it did not get that far."""

    job: dict[str, Any]
    torch: str = torch.__version__
    outcome: Outcome = "ok"
    # first error, or the verdict on a hang
    detail: str = ""
    steps: int = 0
    failed_steps: int = 0
    first_step_s: float | None = None
    cold_total_s: float | None = None
    steady_ktok_s: float | None = None
    peak_mb: float | None = None
    # runs of compiled code in the timed steps, and what it would be if every call of them ran compiled
    compiled_calls: int | None = None
    expected_calls: int | None = None
    late_recompiles: int | None = None
    # function and reason of each of them
    late_reasons: list[str] = field(default_factory=list)
    # failed steps by the name of their exception; a plain dict: asdict breaks a Counter's keys
    errors: dict[str, int] = field(default_factory=dict)


class Run:
    """The threads of one measurement; every thread goes on after a failed step, as the failure is a result."""

    def __init__(self, job: Job, workers: list[Worker], count: Count) -> None:
        self.job, self.workers, self.count = job, workers, count
        self.found = Measured(asdict(job))
        self.began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(len(workers), action=self._at_the_barrier)
        self._phase = 0
        self._tokens = 0
        self._marks: list[tuple[float, int, int]] = []

    def thread(self, index: int) -> None:
        """Cold: every shape once, each thread in an order of its own. Then the timed steps."""
        worker, shapes = self.workers[index], self.job.size.shapes
        with worker.strategy.thread_scope():
            self._barrier.wait()
            for turn in range(shapes):
                self._step(worker, (index + turn) % shapes)
                self._first_step()
            self._barrier.wait()
            tokens = sum(self._step(worker, (index + turn) % shapes) for turn in range(self.job.steps))
            with self._lock:
                self._tokens += tokens
            self._barrier.wait()

    def _step(self, worker: Worker, shape: int) -> int:
        with self._lock:
            self.found.steps += 1
        try:
            return worker.step(shape)
        except Exception as error:  # noqa: BLE001 - whatever a strategy lets happen is what is measured
            self._failed(error)
            return 0

    def _failed(self, error: Exception) -> None:
        text = " ".join(str(error).split())[:200]
        with self._lock:
            self.found.failed_steps += 1
            name = type(error).__name__
            self.found.errors[name] = self.found.errors.get(name, 0) + 1
            if not self.found.detail:
                self.found.detail = f"{name}: {text}"
                traceback.print_exception(error, file=sys.stderr)

    def _first_step(self) -> None:
        with self._lock:
            if self.found.first_step_s is None:
                self.found.first_step_s = time.perf_counter() - self.began_s

    def _at_the_barrier(self) -> None:
        self._marks.append((time.perf_counter(), self.count.value(), _frames_compiled()))

    def finish(self) -> None:
        """Turns the marks of the three barriers into figures."""
        (begin_s, _, _), (warm_s, warm_calls, warm_frames), (end_s, end_calls, end_frames) = self._marks
        found, job = self.found, self.job
        found.cold_total_s = warm_s - begin_s
        found.steady_ktok_s = self._tokens / (end_s - warm_s) / 1e3
        found.compiled_calls = end_calls - warm_calls
        # in either scope: one graph for each layer's forward, one for its backward
        compiled = job.strategy not in UNCOMPILED
        found.expected_calls = 2 * job.size.layers * job.steps * job.threads * compiled
        found.late_recompiles = end_frames - warm_frames
        found.late_reasons = newest_compiles(found.late_recompiles)
        found.outcome = "failed" if found.failed_steps else "ok"


def measure(job: Job) -> Measured:
    """Runs the threads; one that is not done in time makes the whole process hung, with a verdict from its stacks."""
    deadline = time.monotonic() + job.limit_s
    workers = make_workers(job)
    with ExitStack() as stack:
        count = stack.enter_context(counted_compiled_calls())
        run = Run(job, workers, count)
        threads = [
            threading.Thread(target=run.thread, args=(i,), name=f"drafter-{i}", daemon=True) for i in range(job.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            run.found.outcome, run.found.detail = "hung", _verdict()
        else:
            run.finish()
        run.found.peak_mb = _peak_mb(torch.device(job.device))
    return run.found


def _verdict() -> str:
    verdicts = analyse(sample(own_dump, window_s=LOOK_S)).verdicts
    owner = compile_lock_state().owner
    held = next((t.name for t in threading.enumerate() if t.ident == owner), None)
    holder = f"; compile_lock is held by {held}" if held else ""
    return "; ".join(f"{v.kind}: {v.text}" for v in verdicts) + holder


def _frames_compiled() -> int:
    """Frames that dynamo has compiled in this process so far."""
    return int(resolve("dynamo.counters")["frames"]["total"])


def _peak_mb(device: torch.device) -> float:
    """Device memory at its peak; on a CPU the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(emit: Callable[[str], object] = print) -> None:
    """Reads a job as JSON from the first argument."""
    raw = json.loads(sys.argv[1])
    found = measure(Job(**{**raw, "size": Size(**raw["size"])}))
    emit(json.dumps(asdict(found)))
    sys.stdout.flush()
    # threads that hang must not hold the exit
    os._exit(0)


if __name__ == "__main__":
    main()
