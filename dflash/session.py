"""A target's cache that can forget: tokens are appended, looked at, and kept only as far as they were accepted."""

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dflash.errors import DataError, TargetError
from dflash.features import Features
from dflash.target import Target


class TargetSession:
    """One sequence being decoded (batch of one). Attributes: length (tokens kept), forwards (target forwards run).

    Attention layers forget by cropping. Recurrent layers cannot: their state is copied before each block and, when a
    block is not kept whole, put back and the kept tokens run again, which costs one more target forward.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        """Starts empty. `layer_ids`: the layers whose outputs `append` returns; may be empty."""
        self.target, self.layer_ids = target, list(layer_ids)
        self.length = self.forwards = 0
        self._cache = DynamicCache(config=target.model.config)
        # a sliding cache drops old keys for good; a plain one keeps them and the mask still applies the window
        self._cache.layers = [DynamicLayer() if _is_sliding(x) else x for x in self._cache.layers]
        self._stateful = [i for i, layer in enumerate(self._cache.layers) if type(layer) is not DynamicLayer]
        self._saved: list[Any] = []
        self._tokens: list[int] = []

    @property
    def room(self) -> int:
        """Tokens that can still be appended before the target's last position."""
        limit: int | None = getattr(self.target.config, "max_position_embeddings", None)
        return sys.maxsize if limit is None else limit - self.length

    def append(self, tokens: Sequence[int]) -> Features:
        """Runs `tokens` after those kept so far and returns their features: hidden [t, L, H], last [t, H]."""
        if len(tokens) > self.room:
            total, limit = self.length + len(tokens), self.length + self.room
            raise DataError(
                f"a sequence within the target's {limit} positions", f"{total} tokens",
                "shorten the prompt or generate fewer tokens",
            )
        if self._stateful and self.length:
            self._saved = [_copy_layer(self._cache.layers[i]) for i in self._stateful]
        self._tokens = list(tokens)
        return self._forward(self._tokens)

    def keep(self, n: int) -> None:
        """Keeps the first `n` of the tokens last appended and forgets the others."""
        surplus = len(self._tokens) - n
        assert 0 <= n <= len(self._tokens)
        if surplus == 0:
            return
        if self._stateful and not self._saved:
            raise TargetError(
                "a block after a prompt", "a prompt to be cut", "recurrent layers forget only what follows the prompt"
            )
        self._crop(len(self._tokens) if self._stateful else surplus)
        if self._stateful:
            for index, saved in zip(self._stateful, self._saved, strict=True):
                self._cache.layers[index] = _copy_layer(saved)
            if n:
                self._forward(self._tokens[:n])
        self._tokens = self._tokens[:n]

    def _forward(self, tokens: list[int]) -> Features:
        ids = torch.tensor([tokens], device=self.target.device)
        positions = torch.arange(self.length, self.length + len(tokens), device=self.target.device)[None]
        features = self.target.forward_cached(ids, positions, self._cache, self.layer_ids)
        self.length += len(tokens)
        self.forwards += 1
        return features

    def _crop(self, n: int) -> None:
        for index, layer in enumerate(self._cache.layers):
            if index not in self._stateful:
                layer.crop(-n)
        self.length -= n


def check_rollback(target: Target) -> None:
    """TargetError unless running a block, forgetting part of it and going on equals one plain forward.

    A few short forwards, once a target; only targets with recurrent layers need it.
    """
    if target.rollback_checked or not TargetSession(target, [])._stateful:
        return
    n = min(12, target.vocab_size)
    tokens = list(range(n))
    with torch.inference_mode():
        session = TargetSession(target, [])
        session.append(tokens[:5])
        session.append(tokens[7:11])
        session.keep(0)
        session.append([*tokens[5:7], *tokens[:3]])
        session.keep(2)
        got = session.append(tokens[7:]).last
        expected = target.features(torch.tensor(tokens), [0]).last[7:]
    scale = expected.abs().max().item()
    error = (got - expected).abs().max().item() / max(scale, 1e-6)
    if error > (1e-2 if target.dtype == torch.float32 else 1e-1):
        raise TargetError(
            "a recurrent cache that continues from a copied state", f"outputs off by {error:.2g} of their size",
            "this model family cannot be decoded speculatively here", where=str(target.path),
        )
    target.rollback_checked = True


def _is_sliding(layer: Any) -> bool:
    return type(layer) is DynamicSlidingWindowLayer


def _copy_layer(layer: Any) -> Any:
    """A copy of a cache layer that shares nothing that later forwards write to."""
    twin = copy.copy(layer)
    twin.__dict__ = {name: _copy_value(value) for name, value in layer.__dict__.items()}
    return twin


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value
