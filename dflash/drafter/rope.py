"""Rotary positions with the target's theta, scaling and partial rotary; computed, so no table can be too short."""

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Rotation = tuple[Tensor, Tensor]


def inverse_frequencies(config: Qwen3Config) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2] float32 and the factor on cos and sin, from `config.rope_parameters`."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        return frequencies.float(), float(scaling)
    rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    return 1.0 / rope["rope_theta"] ** exponent, 1.0


class Rope(nn.Module):
    """Positions -> (cos, sin); the frequencies stay float32 whatever the module is cast to."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        # plain attribute, not a buffer: `.to(bfloat16)` would round frequencies, and far positions with them
        self._frequencies, self._scaling = inverse_frequencies(config)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        """position_ids [B, T] -> cos, sin, each [B, 1, T, rotary_dim]."""
        if self._frequencies.device != position_ids.device:
            self._frequencies = self._frequencies.to(position_ids.device)
        angles = position_ids[:, None, :, None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first rotary_dim features of x [B, heads, T, D]; the others pass."""
    cos, sin = rotation
    rotary_dim = cos.shape[-1]
    turned = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)
