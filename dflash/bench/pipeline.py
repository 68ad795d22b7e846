"""`dflash bench pipeline`: end-to-end tokens a second beside what targets alone and drafters alone reach here.

The ideal is the slower side's own speed where both sides have hardware of their own, and the two in turn where they
share it. All three runs use the trainer's own threads, queue and update.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from dflash.bench.step import ReadyFeatures
from dflash.command_line import parse, split_arguments, training_config
from dflash.config import TrainConfig
from dflash.data.rows import batches
from dflash.drafter.anchors import Anchors
from dflash.errors import ConfigError
from dflash.features import Features, FeatureSource
from dflash.parts import Parts, build, settled
from dflash.pipeline import replicas
from dflash.pipeline.counts import Counted
from dflash.pipeline.engine import Flow, Pipeline, Settings
from dflash.pipeline.order import Order
from dflash.pipeline.placement import Layout, Placement, layout
from dflash.pipeline.simulate import Plant, simulate
from dflash.progress import seeded
from dflash.step import Stepper

DESCRIPTION = "Options of `dflash train` choose what is measured; --bench.steps, --bench.repeats, --json how."


@dataclass(frozen=True)
class BenchPipelineConfig:
    """Everything `dflash bench pipeline` needs to know."""

    # steps of each run that are timed
    steps: int = 20
    # steps before the timing starts
    warmup: int = 3
    # runs of each kind, taken in turn; medians are reported
    repeats: int = 3
    # print one JSON object instead of lines
    json: bool = False


@dataclass(frozen=True)
class PipelineSpeed:
    """Context tokens a second, padding not counted; medians over the repeats."""

    # all targets, nobody drafting; all drafters, features ready; both
    target_tok_s: float
    drafter_tok_s: float
    tok_s: float
    # what no waiting at all would give, and how that was reckoned
    ideal_tok_s: float
    ideal: str
    # tok_s / ideal_tok_s
    efficiency: float
    # what the discrete-event model says, for hardware of their own
    simulated_tok_s: float
    bottleneck: str
    placement: str
    torch: str


class NoDrafting(Stepper):
    """Takes features and does nothing with them."""

    def count_features(self, batch: object, features: Features | None, anchors: Anchors, tokens: int) -> Counted:
        """The tokens, as if no anchor had been valid."""
        return Counted(None, tokens, empty=1)


class SharedFeatures(ReadyFeatures):
    """Features computed once, by one thread, for all batches."""

    def __init__(self, parts: Parts, ready: Features) -> None:
        FeatureSource.__init__(self, parts.target, None, "online", parts.drafter.target_layer_ids)
        self._ready = ready


def main(words: Sequence[str]) -> int:
    """Parses, measures, prints."""
    own, others = split_arguments(["--bench.json" if word == "--json" else word for word in words], "bench")
    bench = parse(BenchPipelineConfig(), own, prog="dflash bench pipeline")
    config = training_config(others, prog="dflash bench pipeline", description=DESCRIPTION)
    speed = measure(config, bench)
    print(json.dumps(asdict(speed)) if bench.json else lines(speed))
    return 0


def measure(config: TrainConfig, bench: BenchPipelineConfig) -> PipelineSpeed:
    """Runs each kind `repeats` times, in turn, so that a slow moment of the machine meets all of them."""
    if not config.data.pack:
        raise ConfigError("packed rows", "--data.no-pack", "the bench needs one width", where="--data.pack")
    config = settled(replace(config, data=replace(config.data, features="online")))
    with seeded(config.seed):
        parts = build(config)
        if not parts.placement.threaded:
            raise ConfigError("--targets and --drafters", "neither", "for example: --targets cpu --drafters cpu")
        ready = _ready(config, parts)
        taken = [[_run(config, parts, bench, kind, ready) for kind in _KINDS] for _ in range(bench.repeats)]
    targets, drafters, both = (statistics.median(run[i][0] for run in taken) for i in range(3))
    ideal, how = ideal_of(parts.placement, targets, drafters)
    return PipelineSpeed(
        target_tok_s=targets,
        drafter_tok_s=drafters,
        tok_s=both,
        ideal_tok_s=ideal,
        ideal=how,
        efficiency=both / ideal,
        simulated_tok_s=simulated(config, parts.placement, targets, drafters),
        bottleneck=taken[-1][2][1].bottleneck,
        placement=str(parts.placement),
        torch=torch.__version__,
    )


_KINDS = ("targets", "drafters", "both")


def _ready(config: TrainConfig, parts: Parts) -> Features:
    batch = next(iter(batches(parts.store, config.data, config.seed)))
    return FeatureSource(parts.target, None, "online", parts.drafter.target_layer_ids).rows(batch)


def _run(
    config: TrainConfig, parts: Parts, bench: BenchPipelineConfig, kind: str, ready: Features
) -> tuple[float, Flow]:
    """Tokens a second of one run, and how its queue stood."""
    total, place = bench.warmup + bench.steps, parts.placement
    plan = layout(config.optim.accumulate, len(place.drafters), 0, 1)
    pipeline = Pipeline(
        _steppers(config, parts, total, kind), _sources(config, parts, kind, ready), plan, Settings(config.queue_depth)
    )
    stream = Order(parts.store, config.data, config.seed).stream(0, 0, plan)
    with parts.attention.strategy.thread_scope(), pipeline.running(stream, 0, total):
        for number in range(bench.warmup):
            pipeline.step(number)
        pipeline.flow()
        _synchronize(place)
        began_s = time.perf_counter()
        tokens = sum(pipeline.step(number).tokens for number in range(bench.warmup, total))
        _synchronize(place)
        return tokens / (time.perf_counter() - began_s), pipeline.flow()


def _steppers(config: TrainConfig, parts: Parts, total: int, kind: str) -> list[Stepper]:
    made = NoDrafting if kind == "targets" else Stepper
    source = FeatureSource(parts.target, None, "online", parts.drafter.target_layer_ids)
    return [made(config, each, source, total) for each in replicas.drafters(parts, parts.placement.drafters)]


def _sources(config: TrainConfig, parts: Parts, kind: str, ready: Features) -> list[FeatureSource]:
    if kind == "drafters":
        return [SharedFeatures(parts, ready) for _ in parts.placement.targets]
    targets = replicas.targets(config.target, parts.target, parts.placement.targets)
    return [FeatureSource(target, None, "online", parts.drafter.target_layer_ids) for target in targets]


def ideal_of(placement: Placement, target_tok_s: float, drafter_tok_s: float) -> tuple[float, str]:
    """The speed without any waiting, and the rule: hardware of their own, or shared."""
    in_turn = 1 / (1 / target_tok_s + 1 / drafter_tok_s)
    if placement.drafters[0].type == "cuda":
        shared, why = placement.shared, "a GPU has both roles"
    else:
        needed = (len(placement.targets) + len(placement.drafters)) * torch.get_num_threads()
        cores = len(os.sched_getaffinity(0))
        shared, why = needed > cores, f"{needed} busy threads on {cores} cores"
    if shared:
        return in_turn, f"both in turn: {why}"
    return min(target_tok_s, drafter_tok_s), "the slower side alone: hardware of their own"


def simulated(config: TrainConfig, placement: Placement, target_tok_s: float, drafter_tok_s: float) -> float:
    """The model's answer from the measured speeds of the sides."""
    targets, drafters = len(placement.targets), len(placement.drafters)
    plan: Layout = layout(config.optim.accumulate, drafters, 0, 1)
    plant = Plant(
        targets, drafters, target_tok_s / targets, drafter_tok_s / drafters,
        config.data.row_tokens * config.data.batch_rows, plan.micro_batches, config.queue_depth,
    )  # fmt: skip
    return simulate(plant).tok_s


def lines(speed: PipelineSpeed) -> str:
    """The figures, readable."""
    return (
        f"{speed.placement}, torch {speed.torch}\n"
        f"targets alone {speed.target_tok_s:.0f} tok/s, drafters alone {speed.drafter_tok_s:.0f} tok/s\n"
        f"end to end    {speed.tok_s:.0f} tok/s = {speed.efficiency:.2f} of the ideal {speed.ideal_tok_s:.0f} "
        f"({speed.ideal}); simulated {speed.simulated_tok_s:.0f}; waits for {speed.bottleneck}"
    )


def _synchronize(placement: Placement) -> None:
    for device in set(placement.targets + placement.drafters):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
