"""Where a run stands: what a checkpoint holds besides weights, and how it goes back into the parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.checkpoint import Checkpoint
from dflash.config import TrainConfig
from dflash.errors import CheckpointError
from dflash.optim import optimizer_tensors, restore_optimizer
from dflash.parts import Parts
from dflash.pipeline.sharding import full, like

ANOTHER = "delete this checkpoint to go on from an earlier one"


@dataclass
class Progress:
    """Counters of a run; all of them are in every checkpoint."""

    # optimizer steps done
    step: int = 0
    # position of the next micro-batch
    epoch: int = 0
    index: int = 0
    # context tokens seen
    tokens: int = 0
    # micro-batches without a valid anchor, skipped
    empty_batches: int = 0
    # steps skipped because the loss or the gradient was not finite, and how many of them lately in a row
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0
    # steps in a row that had nothing to train on
    empty_in_a_row: int = 0
    # the best evaluation so far and its step
    best_tau: float | None = None
    best_step: int | None = None
    # step of the last evaluation
    evaluated_step: int = 0


def pack(config: TrainConfig, parts: Parts, progress: Progress) -> Checkpoint:
    """Everything that decides what the next step computes."""
    trainer = {f"optim/{k}": v for k, v in optimizer_tensors(parts.optimizer, parts.parameters).items()}
    trainer |= _rng_tensors()
    state = {
        "progress": asdict(progress),
        "target": parts.target.fingerprint,
        "torch": torch.__version__,
        "seed": config.seed,
    }
    weights = {name: full(parameter.detach()) for name, parameter in parts.parameters.items()}
    return Checkpoint(weights, trainer, state)


def unpack(checkpoint: Checkpoint, parts: Parts, where: str) -> Progress:
    """Puts a checkpoint into the parts. CheckpointError when it is of another target or another drafter."""
    if checkpoint.state.get("target") != parts.target.fingerprint:
        raise CheckpointError("the target the run began with", "another one", "see --target.path", where=where)
    progress = _progress(checkpoint.state.get("progress"), where)
    optimizer = {k.removeprefix("optim/"): v for k, v in checkpoint.trainer.items() if k.startswith("optim/")}
    _check_trainer(checkpoint.trainer, optimizer, parts, where)
    load_weights(parts, checkpoint.weights, where)
    restore_optimizer(parts.optimizer, parts.parameters, optimizer)
    _restore_rng(checkpoint.trainer)
    return progress


def _progress(found: object, where: str) -> Progress:
    """Counters as they were saved; a hand that edited them is told which one is wrong."""
    known = Progress()
    if not isinstance(found, dict) or found.keys() != asdict(known).keys():
        raise CheckpointError("the counters of a run", "others", ANOTHER, where=where)
    for name, value in found.items():
        kinds = (int, float) if name == "best_tau" else (int,)
        optional = value is None and getattr(known, name) is None
        if not optional and (not isinstance(value, kinds) or isinstance(value, bool) or value < 0):
            raise CheckpointError(f"{name} as a number", repr(value), ANOTHER, where=where)
    return Progress(**found)


def _check_trainer(trainer: dict[str, Tensor], optimizer: dict[str, Tensor], parts: Parts, where: str) -> None:
    """Moments of the drafter's shapes in float32, and a random state torch can take."""
    rng, fits = trainer.get("rng/cpu"), torch.get_rng_state()
    if rng is None or rng.dtype != fits.dtype or rng.shape != fits.shape:
        raise CheckpointError("a state of the random numbers", "none that fits", ANOTHER, where=where)
    for key, tensor in optimizer.items():
        name, _, kind = key.rpartition("/")
        parameter = parts.parameters.get(name)
        shape = () if kind == "step" or parameter is None else tuple(parameter.shape)
        if parameter is None or tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            got = f"{tensor.dtype} of {list(tensor.shape)}"
            raise CheckpointError(f"{key} of the drafter in float32", got, ANOTHER, where=where)


def load_weights(parts: Parts, weights: dict[str, Tensor], where: str) -> None:
    """Copies named tensors into the drafter's masters. CheckpointError when names or shapes differ."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parts.parameters.items()}
    got = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != got:
        odd = sorted(name for name in shapes.keys() | got.keys() if shapes.get(name) != got.get(name))[0]
        expected = f"{odd} of shape {shapes.get(odd, 'none')}"
        remedy = "use the options the run began with"
        raise CheckpointError(expected, str(got.get(odd, "none")), remedy, where=where)
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            has = "NaN or infinity" if tensor.dtype == torch.float32 else str(tensor.dtype)
            raise CheckpointError(f"finite float32 numbers in {name}", has, ANOTHER, where=where)
    with torch.no_grad():
        for name, parameter in parts.parameters.items():
            parameter.copy_(like(weights[name], parameter))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global generators for a run and restores them afterwards; per process."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _rng_tensors() -> dict[str, Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng/cuda/{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(tensors: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        # a run that moved to a machine with more devices has no state for the new ones: they keep the run's seed
        if (state := tensors.get(f"rng/cuda/{index}")) is not None:
            torch.cuda.set_rng_state(state, index)
