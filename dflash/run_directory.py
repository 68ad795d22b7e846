"""A run's directory: who may write into it, what lies where, what may be deleted."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dflash import checkpoint
from dflash.command_line import read_saved
from dflash.config import FREE_ON_RESUME as FREE
from dflash.config import TrainConfig, same_training
from dflash.environment import environment
from dflash.errors import CheckpointError, OutputError
from dflash.paths import check_empty

MARKER = "dflash-run"
# everything a run or a verb puts there; --overwrite deletes these and nothing else
OWN = frozenset(
    {"config.json", "metrics.jsonl", "checkpoints", "export", "features", "store", "evaluation.json"}
    | {"tensorboard", "wandb"}
)
# file systems over a network that lock no directories
NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP}
OWN_TEMPORARY = (".partial-", "report", "stacks")


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The run's whole configuration."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step or event."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One directory a saved step."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The best checkpoint in z-lab's format."""
        return self.path / "export"

    @property
    def store(self) -> Path:
        """The tokenised training data."""
        return self.path / "store"

    @property
    def features(self) -> Path:
        """The target's features, when they are kept."""
        return self.path / "features"

    def stacks(self, rank: int) -> Path:
        """What the watchdog of a process has seen."""
        return self.path / (f"stacks-rank{rank}.txt" if rank else "stacks.txt")

    @property
    def evaluation(self) -> Path:
        """The last evaluation, over every held-out prompt."""
        return self.path / "evaluation.json"


def check(config: TrainConfig) -> RunDirectory:
    """The directory of this run, checked before anything is computed; writes nothing.

    OutputError: in the way or not writable. CheckpointError: nothing to resume, or a run of another configuration.
    """
    run = RunDirectory(config.output)
    _check_writable(run.path)
    if config.resume:
        _check_same_run(run, config)
    elif config.overwrite and run.path.is_dir() and any(run.path.iterdir()):
        _check_only_a_run(run.path)
    elif not config.overwrite:
        check_empty(run.path)
    return run


@contextmanager
def alone(run: RunDirectory) -> Iterator[None]:
    """Holds the directory for one process at a time, by a lock that ends with it; makes it when it is not there.

    OutputError: another process holds it. Per process; nothing is written for a directory that is there.
    """
    _make(run.path)
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        _lock(descriptor, run.path)
        yield
    finally:
        os.close(descriptor)


def create(run: RunDirectory, config: TrainConfig) -> None:
    """Makes the directory, empties it for --overwrite, and writes the configuration. OutputError when it cannot."""
    check(config)  # again: another run may have begun here while this one was being built
    try:
        if config.overwrite and run.path.is_dir() and any(run.path.iterdir()):
            _check_only_a_run(run.path)
            _empty(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
        # how a run was begun is no part of it: --resume reads this file back as its own options
        kept = replace(config, resume=False, overwrite=False)
        body = {"format": MARKER, "config": asdict(kept), "environment": environment()}
        replace_text(run.config, json.dumps(body, indent=1, default=str) + "\n")
    except OSError as error:
        got, remedy = error.strerror or str(error), "choose another --output"
        raise OutputError("a writable directory", got, remedy, where=str(run.path)) from error


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new one, never a part. OutputError when it cannot."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        got, remedy = error.strerror or str(error), "make room, then go on with --resume"
        raise OutputError("a directory that takes a file", got, remedy, where=str(path)) from error


def is_run(path: Path) -> bool:
    """True for a directory that a run has written its configuration into."""
    try:
        marker: object = json.loads((path / "config.json").read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return marker == MARKER


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got, remedy = error.strerror or str(error), "choose another --output"
        raise OutputError("a writable directory", got, remedy, where=str(path)) from error


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        got, remedy = "another process that writes there", "wait for it, or choose another --output"
        raise OutputError("a directory of its own", got, remedy, where=str(path)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _check_writable(path: Path) -> None:
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise OutputError("a directory", "a file of that name", "choose another --output", where=str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError("a writable directory", "no permission", "choose another --output", where=str(existing))


def _check_same_run(run: RunDirectory, config: TrainConfig) -> None:
    if not is_run(run.path):
        got = "none" if not run.path.exists() else "no config.json of a run"
        raise CheckpointError("a run to resume", got, "start it without --resume", where=str(run.path))
    before = read_saved(run.config)
    if not same_training(before, config):
        found = _differences(before, config)
        got = ", ".join(f"{name} = {ours} (the run has {its})" for name, (ours, its) in found.items())
        remedy = "resume with the same options, or give none: the run knows its own"
        if not found.keys().isdisjoint({"steps", "optim.epochs"}):
            remedy += "; to train longer start a new run: the steps fix the learning rate of every step"
        raise CheckpointError("the run's own configuration", got, remedy, where=str(run.path))
    checkpoint.newest(run.checkpoints)


def _differences(before: TrainConfig, now: TrainConfig) -> dict[str, tuple[object, object]]:
    """Options that may not differ and do: asked for, and the run's own."""
    old, new = _flat(asdict(before)), _flat(asdict(now))
    names = [name for name in new if old[name] != new[name] and name.split(".")[0] not in FREE]
    return {name: (new[name], old[name]) for name in names}


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _check_only_a_run(path: Path) -> None:
    """--overwrite deletes a run's files; a directory that holds anything else is left alone."""
    if path.is_symlink() or not is_run(path):
        got, remedy = "a directory that no run has written", "empty it yourself, or choose another --output"
        raise OutputError("a run to overwrite", got, remedy, where=str(path))
    foreign = sorted(entry.name for entry in path.iterdir() if not _is_own(entry.name))
    if foreign:
        raise OutputError("only a run's files", foreign[0], "move it elsewhere first", where=str(path))


def _is_own(name: str) -> bool:
    return name in OWN or name.startswith(OWN_TEMPORARY)


def _empty(path: Path) -> None:
    """The configuration goes last: until then the directory still is a run that --overwrite may delete."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "config.json"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
