"""Whether what the options name is there, asked before torch is imported: such a mistake is told at once."""

import glob
import re
from pathlib import Path

from dflash.config import TrainConfig
from dflash.errors import CheckpointError, DataError, OutputError, TargetError

EMBEDDED = "embedded"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_train(config: TrainConfig) -> None:
    """Target, data and output of a training. Errors: TargetError, DataError, OutputError."""
    check_target(config.target.path)
    check_data(config.data.train)
    check_data(config.data.heldout)
    if config.output.is_file():
        raise OutputError("a directory", "a file of that name", "choose another --output", where=str(config.output))
    if not (config.resume or config.overwrite):
        check_empty(config.output)


def check_empty(output: Path) -> None:
    """OutputError when a new run would begin among other files."""
    if output.is_dir() and any(output.iterdir()):
        got, remedy = "files in it", "add --resume to go on, --overwrite to start anew, or choose another --output"
        raise OutputError("an empty output directory", got, remedy, where=str(output))


def check_trained(drafter: Path, target: str | None) -> None:
    """The drafter that a verb uses, and its target. Errors: CheckpointError, TargetError."""
    if not drafter.exists():
        expected, got = "a run, a checkpoint or an export", "a path that does not exist"
        raise CheckpointError(expected, got, "check --drafter", where=str(drafter))
    if target is not None:
        check_target(target)


def check_target(name: str) -> None:
    """TargetError unless a target's directory is there, or it is the embedded one."""
    if name != EMBEDDED and not Path(name).is_dir():
        raise missing_target(name)


def check_data(name: str) -> None:
    """DataError unless a path or a pattern names something."""
    if name == EMBEDDED or Path(name).exists() or glob.glob(name):
        return
    raise DataError("a JSONL or Parquet file", "no such file", "check the path", where=name)


def missing_target(name: str) -> TargetError:
    """What to say of a target directory that is not there; a name of the hub gets the command that downloads it."""
    remedy = "download the model and give its path"
    if HUB_NAME.fullmatch(name):
        remedy = f"download it (hf download {name} --local-dir DIR) and give DIR"
    return TargetError("a Hugging Face model directory", "no such directory", remedy, where=name)
