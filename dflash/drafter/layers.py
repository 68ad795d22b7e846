"""The drafter's decoder layer: Qwen3's, with the context's keys and values beside the block's own."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config

from dflash.attention.kernels import Kernel, sdpa_kernel
from dflash.drafter.rope import Rotation, rotate


class Attend(Protocol):
    """The signature of transformers' attention interface, without the settings a drafter does not have."""

    def __call__(
        self,
        module: "Attention",
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
    ) -> tuple[Tensor, None]:
        """query [B, heads, Q, D], key and value [B, kv_heads, S, D] -> ([B, Q, heads, D], None)."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm; the weight is cast at use, so that float32 masters serve bfloat16 activations."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype, also where autocast would give float32."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Block queries over [context ; block] keys; one set of key and value weights for both (arXiv 2602.06036)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.scaling = head_dim**-0.5
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        # the kernel as the strategy compiled it; drafter.use_attention replaces it
        self.attend: Kernel = sdpa_kernel

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """x [B, T, H] (context features, or the block's normed input) -> keys, values [B, kv_heads, T, D]."""
        key = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        value = self._heads(self.v_proj(x)).transpose(1, 2)
        return rotate(key, rotation), value

    def forward(
        self, h: Tensor, context: tuple[Tensor, Tensor], rotation: Rotation, mask: Any, attend: Attend
    ) -> Tensor:
        """h [B, Q, H], context keys and values [B, kv_heads, T, D] -> [B, Q, H]."""
        query = rotate(self.q_norm(self._heads(self.q_proj(h))).transpose(1, 2), rotation)
        own_key, own_value = self.keys_values(h, rotation)
        key = torch.cat([context[0], own_key], dim=2)
        value = torch.cat([context[1], own_value], dim=2)
        out, _ = attend(self, query, key, value, mask, scaling=self.scaling)
        return self.o_proj(out.flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Pre-norm attention and MLP; the context is not normed again."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def over_keys(
        self, x: Tensor, context: tuple[Tensor, Tensor], rotation: Rotation, mask: Any, attend: Attend
    ) -> Tensor:
        """x [B, Q, H] over context keys and values already computed (decoding)."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotation, mask, attend)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def forward(
        self, x: Tensor, ctx: Tensor, rotations: tuple[Rotation, Rotation], mask: Any, attend: Attend
    ) -> Tensor:
        """x [B, Q, H], ctx [B, T, H], rotations of context and block -> [B, Q, H] (training)."""
        context = self.self_attn.keys_values(ctx, rotations[0])
        return self.over_keys(x, context, rotations[1], mask, attend)
