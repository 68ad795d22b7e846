"""The drafter's key-value cache: context only; a block's own keys and values are dropped after each step."""

import torch
from torch import Tensor


class DraftCache:
    """Context keys (normed, rotated) and values of every layer, [1, kv_heads, length, D], in buffers that double."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes keys and values of the new positions after the first `length`; `advance` makes them count."""
        self._keys[layer] = self._write(self._keys[layer], key)
        self._values[layer] = self._write(self._values[layer], value)

    def advance(self, tokens: int) -> None:
        """Counts `tokens` more positions, once every layer has been appended."""
        self.length += tokens

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of `layer`."""
        key, value = self._keys[layer], self._values[layer]
        assert key is not None
        assert value is not None
        return key[:, :, :length], value[:, :, :length]

    def _write(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        end = self.length + new.shape[2]
        if buffer is None or buffer.shape[2] < end:
            grown = new.new_empty(*new.shape[:2], max(2 * end, 64), new.shape[3])
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : end] = new
        return buffer


def decode_mask(length: int, block_size: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """Bool [K, length + K] of a sliding layer whose block starts at position `length`; true where visible."""
    slot = torch.arange(block_size, device=device)[:, None]
    context = torch.arange(length, device=device)[None] > length + slot - window
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    return torch.cat([context, own.tril() if causal else own], dim=1)
