"""Attention kernels: each takes query, key, value, mask and scale, and runs uncompiled as well as compiled."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from dflash.attention.base import MaskForm
from dflash.attention.tiles import tiled_kernel

# query [B, heads, Q, D], key and value [B, kv_heads, S, D], mask, scale -> [B, heads, Q, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]


def sdpa_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Dense attention; mask bool, broadcast to [B, heads, Q, S], true where visible; none: all visible."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def flex_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float) -> Tensor:
    """Block-sparse attention; mask: a BlockMask. Compiled it skips hidden blocks; uncompiled it is dense and slow."""
    grouped = query.shape[1] != key.shape[1]
    out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


# by the form of the mask (AttentionBackend.mask)
KERNELS: dict[MaskForm, Kernel] = {"blocks": flex_kernel, "dense": sdpa_kernel, "tiles": tiled_kernel}
