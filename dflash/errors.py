"""The errors dflash raises: each says what was expected, what was got, and what to do."""


class DflashError(Exception):
    """Root of every error dflash raises on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(DflashError, ValueError):
    """Bad input: one line that says what was expected, what was got and the remedy; exit code 2."""

    exit_code = 2

    def __init__(self, expected: str, got: str, remedy: str, *, where: str = "") -> None:
        """`where` names the place (`file:line`, an option, a directory) and comes first in the message."""
        self.expected, self.got, self.remedy, self.where = expected, got, remedy, where
        place = f"{where}: " if where else ""
        super().__init__(f"{place}expected {expected}, got {got}; {remedy}")


class ConfigError(UserError):
    """An option, a preset or a key of a configuration file."""


class DataError(UserError):
    """A conversation, a prompt file, a template or a store."""


class TargetError(UserError):
    """The target model: its directory, its architecture, its tokenizer."""


class CheckpointError(UserError):
    """A checkpoint or an export that is corrupt, truncated or belongs to another configuration."""


class OutputError(UserError):
    """The output directory: in the way, not writable, or full."""


class StrategyError(UserError):
    """An attention strategy or kernel that is unknown, or that cannot run as asked."""


class Diverged(DflashError):
    """The run cannot go on: losses or gradients stay not finite, or no batch has anything to train on. Exit code 1."""


class Stopped(DflashError):
    """A signal asked for a stop; the checkpoint is written. `exit_code` is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class OutOfMemory(DflashError):
    """A device has no memory left; the message names the options that need less. Exit code 1."""


class Hung(DflashError):
    """Nothing moved for longer than --watchdog allows; the stacks are in the run directory. Exit code 3."""

    exit_code = 3
