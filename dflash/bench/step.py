"""`dflash bench step`: the trainer's own step on rows of a fixed shape, features ready, timed step by step."""

import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch

from dflash.command_line import parse, split_arguments, training_config
from dflash.config import BenchStepConfig, TrainConfig
from dflash.data.rows import Batch, batches
from dflash.features import Features, FeatureSource
from dflash.parts import Parts, build
from dflash.progress import seeded
from dflash.step import Stepper

DESCRIPTION = "Options of `dflash train` choose what is measured; --bench.steps, --bench.warmup, --json how."


@dataclass(frozen=True)
class StepTimes:
    """What was measured; times over the timed steps, memory over the whole process."""

    # median milliseconds a step
    step_ms: float
    # the fastest and the slowest step
    min_ms: float
    max_ms: float
    # context tokens a second, padding not counted, from the median
    tok_s: float
    # drafted block tokens a step
    block_tokens: int
    # peak resident memory of the process, or peak memory allocated on the GPU
    peak_mb: float
    # first step, compilation included
    first_step_ms: float
    steps: int
    device: str
    attention: str
    torch: str
    threads: int


class ReadyFeatures(FeatureSource):
    """Features computed once: the target's time is not the drafter's."""

    def __init__(self, parts: Parts, batch: Batch) -> None:
        super().__init__(parts.target, None, "online", parts.drafter.target_layer_ids)
        self._ready = super().rows(batch)

    def rows(self, batch: object, device: object = None) -> Features:
        """The same features whatever the batch."""
        return self._ready


def main(words: Sequence[str]) -> int:
    """Parses, measures, prints."""
    # --json is no option of train, so it may be written short
    own, others = split_arguments(["--bench.json" if word == "--json" else word for word in words], "bench")
    bench = parse(BenchStepConfig(), own, prog="dflash bench step")
    config = training_config(others, prog="dflash bench step", description=DESCRIPTION)
    times = measure(config, bench)
    print(json.dumps(asdict(times)) if bench.json else line(times))
    return 0


def measure(config: TrainConfig, bench: BenchStepConfig) -> StepTimes:
    """Runs the step on the first batch of the data, again and again; the seed fixes weights, rows and anchors."""
    with seeded(config.seed):
        parts = build(replace(config, data=replace(config.data, features="online")))
        micro_batches = list(islice(batches(parts.store, config.data, config.seed), config.optim.micro_batches))
        source = ReadyFeatures(parts, micro_batches[0])
        stepper = Stepper(config, parts, source, bench.warmup + bench.steps)
        with parts.attention.strategy.thread_scope():
            taken = [_timed(stepper, number, micro_batches) for number in range(bench.warmup + bench.steps)]
    timed_ms = taken[bench.warmup :]
    tokens = sum(int((batch.document_ids >= 0).sum()) for batch in micro_batches)
    median_ms = statistics.median(timed_ms)
    return StepTimes(
        step_ms=median_ms,
        min_ms=min(timed_ms),
        max_ms=max(timed_ms),
        tok_s=tokens / median_ms * 1e3,
        block_tokens=config.data.batch_rows * config.drafter.max_anchors * config.drafter.block_size,
        peak_mb=_peak_mb(parts.device),
        first_step_ms=taken[0],
        steps=bench.steps,
        device=_name(parts.device),
        attention=f"{parts.attention.strategy.name}/{parts.attention.kernel}",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )


def line(times: StepTimes) -> str:
    """The figures on one line."""
    return (
        f"{times.step_ms:.1f} ms a step ({times.min_ms:.1f} to {times.max_ms:.1f}, {times.steps} steps, first "
        f"{times.first_step_ms:.0f} ms)  {times.tok_s:.0f} tok/s  peak {times.peak_mb:.0f} MB  "
        f"{times.attention} on {times.device}, {times.threads} threads, torch {times.torch}"
    )


def _timed(stepper: Stepper, number: int, micro_batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    stepper.step(number, micro_batches)
    if stepper.parts.device.type == "cuda":
        torch.cuda.synchronize(stepper.parts.device)
    return (time.perf_counter() - start) * 1e3


def _peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
