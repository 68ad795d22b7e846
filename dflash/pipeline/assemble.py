"""From the parts of a run to the engine that computes its steps."""

from collections.abc import Callable

from dflash.features import FeatureSource
from dflash.pipeline import replicas
from dflash.pipeline.engine import Pipeline, Settings
from dflash.pipeline.in_turn import InTurn
from dflash.pipeline.placement import Layout
from dflash.step import Stepper


def assemble(stepper: Stepper, layout: Layout, beat: Callable[[str], None]) -> Pipeline | InTurn:
    """Threads on the devices of the parts' placement, or one thread; `stepper` is the first drafter's.

    Loads the target once a device and copies the drafter. Errors: TargetError.
    """
    config, parts, placement = stepper.config, stepper.parts, stepper.parts.placement
    if not placement.threaded:
        return InTurn(stepper, layout)
    first = stepper.source
    others = [
        Stepper(config, each, first, stepper.total_steps) for each in replicas.drafters(parts, placement.drafters)[1:]
    ]
    targets = replicas.targets(config.target, parts.target, placement.targets)
    sources = [FeatureSource(target, first.store, first.mode, first.layer_ids) for target in targets]
    return Pipeline([stepper, *others], sources, layout, Settings(config.queue_depth, config.restarts, beat))
