"""python -m dflash.bench.soak --minutes 30: the pipeline under random delays and faults, every sample accounted for.

Two target and three drafter threads on the CPU train the embedded target's drafter. Target threads die and are
replaced; drafters fail, the run ends, and it is resumed from its checkpoint, until the time is over. At the end every
optimizer step must have used exactly its own micro-batches, no thread may be left, and memory must not have grown.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dflash import checkpoint
from dflash.command_line import parse
from dflash.config import PRESETS, EvalOptions, TrainConfig
from dflash.data.documents import DocumentStore
from dflash.data.rows import Batch
from dflash.errors import DflashError, Stopped
from dflash.features import FeatureSource
from dflash.log import RunLog
from dflash.pipeline.engine import Pipeline
from dflash.pipeline.order import Order
from dflash.pipeline.placement import Layout
from dflash.step import Stepper
from dflash.train import train

# memory may grow by this share of itself over the second half of the soak: allocators breathe
GROWTH = 0.05
SAMPLE_S = 1.0
Ticket = tuple[int, int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class SoakOptions:
    """What the soak does."""

    # how long it runs
    minutes: float = 30.0
    # longest random delay of a micro-batch in a thread, in milliseconds
    delay_ms: float = 30.0
    # chance that a target thread dies at a micro-batch, and that a drafter thread fails at one
    target_fault: float = 0.02
    drafter_fault: float = 0.002
    # seed of delays and faults
    seed: int = 0
    # print one JSON object instead of lines
    json: bool = False


class Injected(DflashError):
    """A fault of the soak's own."""


@dataclass
class Ledger:
    """What happened. used: the micro-batches of each step, as the last attempt at it took them."""

    used: dict[int, list[Ticket]] = field(default_factory=dict)
    steps_tried: int = 0
    target_faults: int = 0
    drafter_faults: int = 0
    runs: int = 0
    # (seconds since the start, resident MB)
    memory: list[tuple[float, float]] = field(default_factory=list)
    store: DocumentStore | None = None


@dataclass(frozen=True)
class SoakResult:
    """The account."""

    minutes: float
    runs: int
    steps: int
    # steps done again after a resume from an earlier checkpoint
    steps_repeated: int
    target_faults: int
    drafter_faults: int
    samples: int
    # micro-batches that a step lacked, or had beyond its own
    lost: int
    repeated: int
    threads_left: tuple[str, ...]
    memory_mb: tuple[float, float]
    # least squares over the second half of the time
    slope_mb_h: float
    ok: bool


def main(words: Sequence[str]) -> int:
    """Parses, soaks, prints; 0 when everything is accounted for, 1 otherwise."""
    options = parse(SoakOptions(), words, prog="python -m dflash.bench.soak", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        result = soak(options, config_for(Path(folder) / "run"))
    print(json.dumps(asdict(result)) if options.json else lines(result))
    return 0 if result.ok else 1


def config_for(output: Path) -> TrainConfig:
    """Two targets, three drafters, a run that does not end by itself."""
    tiny = PRESETS["tiny"]
    return replace(
        tiny,
        output=output,
        steps=10**7,
        device="cpu",
        targets="cpu,cpu",
        drafters="cpu,cpu,cpu",
        restarts=10**9,
        save_every=20,
        watchdog=120.0,
        optim=replace(tiny.optim, accumulate=4),
        eval=EvalOptions(every=0, prompts=1, max_new_tokens=4),
    )


def soak(options: SoakOptions, config: TrainConfig) -> SoakResult:
    """Trains until the time is over, resuming after every fault that ends a run. Patches classes of this process."""
    ledger, began_s = Ledger(), time.monotonic()
    with disturbed(options, ledger, began_s + options.minutes * 60):
        while time.monotonic() < began_s + options.minutes * 60:
            ledger.runs += 1
            again = bool(checkpoint.saved_steps(config.output / "checkpoints"))
            overwrite = not again and config.output.exists()
            try:
                train(replace(config, resume=again, overwrite=overwrite), RunLog(Console(quiet=True)))
            except (Injected, Stopped):
                continue
    return account(ledger, config, (time.monotonic() - began_s) / 60)


@contextmanager
def disturbed(options: SoakOptions, ledger: Ledger, end_s: float) -> Iterator[None]:
    """Delays, faults and the ledger round the pipeline's own methods; per process, restored on exit."""
    originals = [(FeatureSource, "rows"), (Stepper, "count_features"), (Pipeline, "step")]
    saved = [(owner, name, getattr(owner, name)) for owner, name in originals]
    draw, lock = random.Random(options.seed), threading.Lock()
    taken: list[Ticket] = []
    rows, count_features, step = (method for _, _, method in saved)

    def hit(chance: float) -> bool:
        with lock:
            delay_s, fault = draw.random() * options.delay_ms / 1e3, draw.random() < chance
        time.sleep(delay_s)
        return fault

    def shaky_rows(self: FeatureSource, batch: Batch, device: Any = None) -> Any:
        if hit(options.target_fault):
            ledger.target_faults += 1
            raise Injected("a target thread dies")
        return rows(self, batch, device)

    def shaky_count(self: Stepper, batch: Batch, *rest: Any) -> Any:
        if hit(options.drafter_fault):
            ledger.drafter_faults += 1
            raise Injected("a drafter thread fails")
        counted = count_features(self, batch, *rest)
        with lock:
            taken.append((batch.epoch, batch.index, batch.doc_ids))
        return counted

    def noted_step(self: Pipeline, number: int) -> Any:
        taken.clear()
        result = step(self, number)
        ledger.used[number] = list(taken)
        ledger.steps_tried += 1
        ledger.store = self.steppers[0].parts.store
        now_s = time.monotonic()
        if not ledger.memory or now_s - ledger.memory[-1][0] >= SAMPLE_S:
            ledger.memory.append((now_s, resident_mb()))
        if now_s >= end_s:
            signal.raise_signal(signal.SIGTERM)
        return result

    try:
        for (owner, name, _), changed in zip(saved, (shaky_rows, shaky_count, noted_step), strict=True):
            setattr(owner, name, changed)
        yield
    finally:
        for owner, name, method in saved:
            setattr(owner, name, method)


def account(ledger: Ledger, config: TrainConfig, minutes: float) -> SoakResult:
    """Compares what every step used with what the data's order says it must use."""
    assert ledger.store is not None, "not one step was done"
    size, steps = config.optim.accumulate, len(ledger.used)
    stream = Order(ledger.store, config.data, config.seed).stream(0, 0, Layout(size))
    lost = repeated = 0
    for number in range(steps):
        expected = [(batch.epoch, batch.index, batch.doc_ids) for batch in islice(stream, size)]
        used = list(ledger.used.get(number, []))
        for ticket in expected:
            if ticket in used:
                used.remove(ticket)
            else:
                lost += 1
        repeated += len(used)
    left = tuple(t.name for t in threading.enumerate() if t.name.startswith(("target-", "drafter-", "watchdog")))
    slope, growth = trend(ledger.memory)
    return SoakResult(
        minutes=minutes,
        runs=ledger.runs,
        steps=steps,
        steps_repeated=ledger.steps_tried - steps,
        target_faults=ledger.target_faults,
        drafter_faults=ledger.drafter_faults,
        samples=steps * size,
        lost=lost,
        repeated=repeated,
        threads_left=left,
        memory_mb=(ledger.memory[0][1], ledger.memory[-1][1]),
        slope_mb_h=slope,
        ok=lost == repeated == 0 and not left and growth < GROWTH,
    )


def trend(memory: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """MB an hour over the second half of the samples, and that growth as a share of the memory."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0, 0.0
    seconds, mb = np.array(half).T
    slope_mb_s = float(np.polyfit(seconds - seconds[0], mb, 1)[0])
    return slope_mb_s * 3600, slope_mb_s * float(seconds[-1] - seconds[0]) / float(mb.mean())


def resident_mb() -> float:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines(result: SoakResult) -> str:
    """The account, readable."""
    return (
        f"{result.minutes:.1f} minutes, {result.runs} runs, {result.steps} steps ({result.steps_repeated} done again "
        f"after a resume), {result.target_faults} target and {result.drafter_faults} drafter faults\n"
        f"{result.samples} micro-batches: {result.lost} lost, {result.repeated} repeated; threads left: "
        f"{', '.join(result.threads_left) or 'none'}\n"
        f"memory {result.memory_mb[0]:.0f} -> {result.memory_mb[1]:.0f} MB, slope {result.slope_mb_h:+.1f} MB/h over "
        f"the second half: {'ok' if result.ok else 'NOT OK'}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
