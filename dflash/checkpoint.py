"""Checkpoints: safetensors and JSON, checksummed, written beside and renamed into place, verified when read."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.errors import CheckpointError, OutputError

FORMAT = 1
WEIGHTS, TRAINER, STATE = "drafter.safetensors", "trainer.safetensors", "state.json"
PARTIAL = ".partial-"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped.

    weights  the drafter's trainable tensors (float32 masters), named as in an export
    trainer  optimizer state and random-number states
    state    JSON: step, data position, counters, configuration
    """

    weights: dict[str, Tensor]
    trainer: dict[str, Tensor]
    state: dict[str, Any]


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return root / f"step-{step:08d}"


def saved_steps(root: Path) -> list[int]:
    """Steps of which there is a whole checkpoint directory, oldest first."""
    found = (path.name.removeprefix("step-") for path in root.glob("step-*"))
    return sorted(int(name) for name in found if name.isdigit())


def save(root: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Writes the checkpoint of `step`; it is there whole or not at all. OutputError when it cannot be written."""
    target, partial = step_directory(root, step), root / f"{PARTIAL}{step:08d}"
    with _writing(root, partial):
        root.mkdir(parents=True, exist_ok=True)
        remove_partial(root)
        partial.mkdir()
        for name, tensors in ((WEIGHTS, checkpoint.weights), (TRAINER, checkpoint.trainer)):
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, partial / name)
            _sync(partial / name)
        digests = {name: _sha256(partial / name) for name in (WEIGHTS, TRAINER)}
        body = {"format": FORMAT, "step": step, "sha256": digests, "state": checkpoint.state}
        (partial / STATE).write_text(_sealed(body), encoding="utf-8")
        _sync(partial / STATE)
        _sync(partial)
        if target.exists():
            # a run that resumed from an earlier step has come here again; the newer one replaces it
            os.rename(target, root / f"{PARTIAL}replaced-{step:08d}")
        os.rename(partial, target)
        _sync(root)
        remove_partial(root)
    return target


def load(directory: Path) -> Checkpoint:
    """Reads and verifies one checkpoint; CheckpointError names the file that is missing, cut or changed."""
    state = read_state(directory)
    tensors = {}
    for name, digest in state["sha256"].items():
        path = directory / name
        if not path.is_file():
            raise _broken(directory, f"no {name}")
        if _sha256(path) != digest:
            raise _broken(directory, f"{name} with other contents than when it was written")
        try:
            tensors[name] = load_file(path)
        except SafetensorError as error:
            raise _broken(directory, f"{name}: {error}") from error
    return Checkpoint(tensors[WEIGHTS], tensors[TRAINER], state["state"])


def read_state(directory: Path) -> dict[str, Any]:
    """The verified JSON part: format, step, sha256 of the files, state."""
    try:
        body: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        seal = body.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _broken(directory, f"{STATE} that cannot be read ({type(error).__name__})") from error
    if body.get("format") != FORMAT:
        raise _broken(directory, f"format {body.get('format')}")
    if seal != _digest(body):
        raise _broken(directory, f"{STATE} with other contents than when it was written")
    files, state = body.get("sha256"), body.get("state")
    if not isinstance(files, dict) or set(files) != {WEIGHTS, TRAINER} or not isinstance(state, dict):
        raise _broken(directory, f"{STATE} without what a run needs")
    return body


def newest(root: Path) -> Path:
    """The newest checkpoint directory under `root`; CheckpointError when there is none."""
    steps = saved_steps(root)
    if not steps:
        remedy = "the run never saved: start it anew with --overwrite"
        raise CheckpointError("a checkpoint", "none", remedy, where=str(root))
    return step_directory(root, steps[-1])


def prune(root: Path, keep: int, best_step: int | None) -> None:
    """Deletes all but the `keep` newest checkpoints and the best one."""
    steps = saved_steps(root)
    for step in set(steps[: max(0, len(steps) - keep)]) - {best_step}:
        # renamed first: a kill in the middle leaves a partial directory, never half a checkpoint
        doomed = root / f"{PARTIAL}old-{step:08d}"
        os.rename(step_directory(root, step), doomed)
        shutil.rmtree(doomed)


def remove_partial(root: Path) -> None:
    """Deletes what an interrupted save left behind."""
    for path in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(path)


@contextmanager
def _writing(root: Path, partial: Path) -> Iterator[None]:
    """Failures to write become one OutputError, and what was half written is removed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        number = error.errno if isinstance(error, OSError) else _errno_in(str(error))
        if isinstance(error, SafetensorError) and number is None:
            raise
        got = "no space left" if number in NO_SPACE else os.strerror(number or errno.EIO)
        intact = "make room, then go on with --resume; earlier checkpoints are intact"
        remedy = intact if saved_steps(root) else "make room, then start anew with --overwrite: nothing was saved yet"
        raise OutputError("room for a checkpoint", got, remedy, where=str(root)) from error


def _errno_in(message: str) -> int | None:
    """safetensors reports the operating system's number in its text: `(os error 28)`."""
    _, found, tail = message.partition("os error ")
    digits = tail.split(")", 1)[0]
    return int(digits) if found and digits.isdigit() else None


def _broken(directory: Path, got: str) -> CheckpointError:
    remedy = f"delete {directory.name} to go on from an earlier checkpoint"
    return CheckpointError("a whole checkpoint", got, remedy, where=str(directory))


def _sealed(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, "seal": _digest(body)}, indent=1)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
