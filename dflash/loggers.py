"""Where a run's records go: metrics.jsonl always, TensorBoard and Weights & Biases when asked for (extras)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from dflash.errors import ConfigError
from dflash.metrics_file import MetricsFile
from dflash.run_directory import RunDirectory

LoggerName = Literal["tensorboard", "wandb"]
# kinds of records that are curves; the others are events, which metrics.jsonl keeps
CURVES = {"step": "train", "eval": "heldout", "flow": "queue"}


class Logger(Protocol):
    """Takes the records of a run: kind (step, eval, skip, late_compile), optimizer step, values by name."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record."""
        ...

    def close(self) -> None:
        """What is buffered goes out."""
        ...


class Loggers:
    """All of a run's loggers as one; `sync` is for the file a checkpoint counts on."""

    def __init__(self, metrics: MetricsFile, others: Sequence[Logger]) -> None:
        """`metrics` is written first: what it cannot take is in no other place either."""
        self._metrics, self._others = metrics, others

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record to all."""
        self._metrics.write(kind, step, dict(values))
        for logger in self._others:
            logger.write(kind, step, values)

    def sync(self) -> None:
        """metrics.jsonl to the disk."""
        self._metrics.sync()


class TensorBoard:
    """Event files in <run>/tensorboard."""

    def __init__(self, directory: Path) -> None:
        """Opens a new event file; a resumed run adds one."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Curves only."""
        for name, value in scalars(kind, values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run in <run>/wandb: offline, unless the user's own WANDB_MODE says otherwise."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        """Starts the run."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        name = directory.resolve().name
        self._run: Any = wandb.init(project="dflash", name=name, dir=str(directory), mode=mode, config=dict(config))

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Curves only; the step is a value of its own, because a resumed run goes back."""
        if found := scalars(kind, values):
            self._run.log({**found, "step": step})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish(quiet=True)


def check_loggers(names: Sequence[str]) -> None:
    """ConfigError for a logger whose package is not installed; imports nothing."""
    for name in names:
        if find_spec(name) is None:
            remedy = f"install it: pip install 'dflash[{name}]'"
            raise ConfigError(f"the package {name}", "none", remedy, where="--loggers")


@contextmanager
def open_loggers(
    names: Sequence[LoggerName], run: RunDirectory, config: Mapping[str, Any], shown: Logger
) -> Iterator[Loggers]:
    """metrics.jsonl, what is `shown`, and the named ones; all are closed on exit, whatever happened."""
    with MetricsFile(run.metrics) as metrics, ExitStack() as stack:
        others = [shown]
        for name in names:
            made: Logger = (
                TensorBoard(run.path / name) if name == "tensorboard" else WeightsAndBiases(run.path, config)
            )
            stack.callback(made.close)
            others.append(made)
        yield Loggers(metrics, others)


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record as curves: train/loss, train/conditional_acceptance/3; none for events."""
    prefix = CURVES.get(kind)
    if prefix is None:
        return {}
    found: dict[str, float] = {}
    for name, value in values.items():
        many = enumerate(value, start=1) if isinstance(value, (list, tuple)) else None
        parts = dict(value) if isinstance(value, Mapping) else dict(many) if many is not None else None
        for key, part in parts.items() if parts is not None else [("", value)]:
            if isinstance(part, (int, float)) and not isinstance(part, bool):
                found[f"{prefix}/{name}/{key}".rstrip("/")] = float(part)
    return found
