"""Builds a block mask, uncompiled."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
print("built", torch.__version__)
