"""Trains DFlash drafters; the two names of the public API load on first use, so that importing dflash costs nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.drafter.config import create_drafter_config
    from dflash.drafter.model import DFlashDrafter

__all__ = ["DFlashDrafter", "create_drafter_config"]


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it."""
    if name == "DFlashDrafter":
        from dflash.drafter.model import DFlashDrafter

        return DFlashDrafter
    if name == "create_drafter_config":
        from dflash.drafter.config import create_drafter_config

        return create_drafter_config
    raise AttributeError(f"module 'dflash' has no attribute {name!r}")
