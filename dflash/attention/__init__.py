"""Attention: kernels (what is computed) and strategies (how it is made safe to compile in threads).

For other projects: `from dflash.attention import isolated_tracing, backward_ahead`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash.attention.isolated import backward_ahead, isolated_tracing
    from dflash.attention.select import STRATEGIES, choose

__all__ = ["STRATEGIES", "backward_ahead", "choose", "isolated_tracing"]


def __getattr__(name: str) -> Any:
    """Imported at first use: reading a configuration needs no torch."""
    if name in ("isolated_tracing", "backward_ahead"):
        from dflash.attention import isolated

        return getattr(isolated, name)
    if name in ("STRATEGIES", "choose"):
        from dflash.attention import select

        return getattr(select, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
