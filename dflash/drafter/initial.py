"""Initial weights copied from the target: its last attention layers and final norm, wherever shapes agree."""

from typing import Any

import torch
from torch import Tensor, nn

from dflash.drafter.model import DFlashDrafter
from dflash.errors import TargetError

_LINEAR = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@torch.no_grad()
def init_from_target(drafter: DFlashDrafter, target_model: nn.Module) -> tuple[str, ...]:
    """Copies what fits from the target's last layers; the rest keeps its values. Returns the names copied.

    Layers without softmax attention (hybrids) are passed over. Errors: TargetError when nothing fits.
    """
    decoder: Any = target_model.get_decoder()  # type: ignore[operator]
    attention_layers = [layer for layer in decoder.layers if hasattr(layer, "self_attn")]
    sources = attention_layers[-len(drafter.layers) :]
    copied: list[str] = []
    # the last drafter layer takes the last target layer, also when the target has fewer
    first = len(drafter.layers) - len(sources)
    for index, source in enumerate(sources, start=first):
        destination = drafter.layers[index]
        weights = {f"{name}.weight": _linear(source, name) for name in _LINEAR}
        weights |= {f"{name}.weight": _norm(source, name, destination) for name in _NORMS}
        copied += [f"layers.{index}.{name}" for name in _copy(destination, weights)]
    copied += _copy(drafter, {"norm.weight": _norm(decoder, "norm", drafter)})
    if not copied:
        raise TargetError(
            "a target with a layer shaped like the drafter's", type(target_model).__name__, "use init random"
        )
    return tuple(copied)


def _module(parent: nn.Module, name: str) -> nn.Module | None:
    for part in name.split("."):
        parent = getattr(parent, part, None)  # type: ignore[assignment]
        if parent is None:
            return None
    return parent


def _linear(parent: nn.Module, name: str) -> Tensor | None:
    found = _module(parent, name)
    return found.weight if isinstance(found, nn.Linear) else None


def _norm(parent: nn.Module, name: str, destination: nn.Module) -> Tensor | None:
    """The factor a norm applies, read from what it does to ones: some families store it minus one."""
    found, own = _module(parent, name), destination.get_parameter(f"{name}.weight")
    stored = None if found is None else next(found.parameters(), None)
    if found is None or stored is None or stored.shape != own.shape:
        return None
    factor: Tensor = found(torch.ones(1, own.shape[0], dtype=stored.dtype, device=stored.device))[0]
    return factor if bool(factor.any()) else None  # zeros: a norm that subtracts the mean, which the drafter's does not


def _copy(destination: nn.Module, weights: dict[str, Tensor | None]) -> list[str]:
    copied = []
    for name, weight in weights.items():
        own = destination.get_parameter(name)
        if weight is not None and weight.shape == own.shape:
            own.copy_(weight)
            copied.append(name)
    return copied
