"""`dflash plan`: how many target and drafter devices to use, from the speed of one of each, by simulation."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from dflash.command_line import parse_required
from dflash.errors import ConfigError
from dflash.log import RunLog
from dflash.pipeline.simulate import Flow, Plant, best_split, ideal_tok_s, simulate

DESCRIPTION = """\
Simulate the pipeline: tokens a second, which side waits, what one more device of each kind brings.

The speeds are of one device alone: `dflash bench pipeline` measures them.

examples:
  dflash plan --targets 5 --drafters 3 --target-tok-s 5200 --drafter-tok-s 23000
  dflash plan --targets 1 --drafters 1 --target-tok-s 900 --drafter-tok-s 400 --spread 0.3 --json
"""


@dataclass(frozen=True)
class PlanConfig:
    """Everything `dflash plan` needs to know."""

    # devices that run the target
    targets: int
    # devices that run a drafter
    drafters: int
    # context tokens a second of one target device (forward)
    target_tok_s: float
    # context tokens a second of one drafter device (forward and backward)
    drafter_tok_s: float
    # context tokens a micro-batch: --data.row-tokens times --data.batch-rows
    batch_tokens: int = 3072
    # micro-batches a step, over all drafters; 0: one for each
    accumulate: int = 0
    # micro-batches in the queue
    queue_depth: int = 4
    # milliseconds a step in which no drafter computes (gradients' sum, optimizer, new weights)
    sync_ms: float = 0.0
    # standard deviation / mean of a micro-batch's time
    spread: float = 0.1
    # print one JSON object instead of the table
    json: bool = False


def main(words: Sequence[str]) -> int:
    """Parses, simulates, prints."""
    config = parse_required(PlanConfig, words, prog="dflash plan", description=DESCRIPTION)
    plant = _plant(config)
    choices = choices_of(plant)
    if config.json:
        flows = {
            name: {"plant": asdict(p), **asdict(f), "bottleneck": f.bottleneck} for name, (p, f) in choices.items()
        }
        print(json.dumps({"ideal_tok_s": ideal_tok_s(plant), **flows}))
        return 0
    log = RunLog()
    columns = ["", "targets", "drafters", "tok/s", "a device", "targets busy", "drafters busy", "waits for"]
    log.table("pipeline", columns, [_row(name, *choice) for name, choice in choices.items()])
    log.line(_advice(choices))
    return 0


def choices_of(plant: Plant) -> dict[str, tuple[Plant, Flow]]:
    """The asked plant, one more of each, and the best split of as many devices."""
    plants = {
        "as asked": plant,
        "one more target": replace(plant, targets=plant.targets + 1),
        "one more drafter": replace(plant, drafters=plant.drafters + 1),
        "best split": best_split(plant, plant.targets + plant.drafters),
    }
    return {name: (choice, simulate(choice)) for name, choice in plants.items()}


def _plant(config: PlanConfig) -> Plant:
    positive = ("targets", "drafters", "target_tok_s", "drafter_tok_s", "batch_tokens", "queue_depth")
    for name in (*positive, "accumulate", "sync_ms", "spread"):
        value = getattr(config, name)
        if not (value > 0 if name in positive else value >= 0):
            expected = "a number above 0" if name in positive else "0 or more"
            raise ConfigError(expected, str(value), "change the value", where=f"--{name.replace('_', '-')}")
    if config.accumulate and config.accumulate < config.drafters:
        got = f"{config.accumulate} for {config.drafters} drafters"
        raise ConfigError("a micro-batch a step for every drafter", got, "raise it, or use 0", where="--accumulate")
    same = {name: getattr(config, name) for name in (*positive, "accumulate", "spread")}
    return Plant(**same, sync_s=config.sync_ms / 1e3)


def _row(name: str, plant: Plant, flow: Flow) -> list[str]:
    devices = plant.targets + plant.drafters
    return [
        name,
        str(plant.targets),
        str(plant.drafters),
        f"{flow.tok_s:.0f}",
        f"{flow.tok_s / devices:.0f}",
        f"{flow.target_busy:.0%}",
        f"{flow.drafter_busy:.0%}",
        flow.bottleneck,
    ]


def _advice(choices: dict[str, tuple[Plant, Flow]]) -> str:
    now, best = choices["as asked"], choices["best split"]
    gains = {kind: choices[f"one more {kind}"][1].tok_s / now[1].tok_s - 1 for kind in ("target", "drafter")}
    kind = max(gains, key=lambda name: gains[name])
    text = f"the pipeline waits for its {now[1].bottleneck}; the next device to buy is a {kind} (+{gains[kind]:.0%})"
    if best[1].tok_s > 1.01 * now[1].tok_s:
        split = f"{best[0].targets} targets and {best[0].drafters} drafters"
        text += f"; the same number of devices as {split} gives {best[1].tok_s / now[1].tok_s - 1:+.0%}"
    return text
