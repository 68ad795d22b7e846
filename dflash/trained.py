"""A trained drafter and its target, from whatever the user has: a run, one of its checkpoints, or an export."""

from dataclasses import dataclass, replace
from pathlib import Path

from dflash import checkpoint, run_directory
from dflash.command_line import read_saved
from dflash.config import TargetOptions, TrainConfig
from dflash.drafter.model import DFlashDrafter
from dflash.errors import CheckpointError, ConfigError
from dflash.export.files import load_weights
from dflash.export.formats import read_export
from dflash.outcome import best_checkpoint
from dflash.parts import build_drafter, load_target, resolve_device
from dflash.run_directory import RunDirectory
from dflash.target import Target


@dataclass(frozen=True)
class Trained:
    """A drafter bound to its target; `config`: the run's, none for an export; `source`: what was read."""

    drafter: DFlashDrafter
    target: Target
    config: TrainConfig | None
    source: Path


def open_trained(path: Path, options: TargetOptions | None, device: str, trust_remote_code: bool = False) -> Trained:
    """Reads `path`; `options` names the target, none: the run's own. CheckpointError or ConfigError when it cannot."""
    run = _run_of(path)
    config = None if run is None else read_saved(run / "config.json")
    if options is not None:
        options = replace(options, trust_remote_code=trust_remote_code)
    else:
        if config is None:
            raise ConfigError("a target", "none", "an export does not know where its target is: give --target DIR")
        options = replace(config.target, trust_remote_code=trust_remote_code)
    if run is None and not path.is_dir():
        expected = "a run, a checkpoint or an export"
        raise CheckpointError(expected, "no such directory", "check --drafter", where=str(path))
    target = load_target(options, resolve_device(device))
    if config is None or run is None:
        drafter = read_export(path)
    else:
        path = _best(RunDirectory(run)) if path == run else path
        drafter = build_drafter(config, target)
        load_weights(drafter, checkpoint.load(path).weights, path)
    drafter.bind_target(target.embedding, target.head)
    return Trained(drafter.to(target.device), target, config, path)


def _best(run: RunDirectory) -> Path:
    return checkpoint.step_directory(run.checkpoints, best_checkpoint(run))


def _run_of(path: Path) -> Path | None:
    """The run directory that `path` is, or that it is a checkpoint of."""
    if run_directory.is_run(path):
        return path
    if path.name.startswith("step-") and run_directory.is_run(path.parent.parent):
        return path.parent.parent
    return None
