"""Speculative decoding: the drafter proposes a block, the target checks it in one forward; the text is the target's.

Source: arXiv 2602.06036 (block drafting); Leviathan et al., arXiv 2211.17192 (rejection rule for temperature > 0).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from dflash.errors import ConfigError, DataError
from dflash.features import Features
from dflash.session import TargetSession, check_rollback
from dflash.target import Target


class Drafter(Protocol):
    """What decoding needs of a drafter; DFlashDrafter has it."""

    @property
    def block_size(self) -> int:
        """Tokens a block, K."""
        ...

    @property
    def mask_token_id(self) -> int:
        """The token of unknown slots."""
        ...

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """The target layers whose outputs `draft` is given."""
        ...

    def new_cache(self) -> Any:
        """An empty cache for one sequence."""
        ...

    def draft(self, cache: Any, new_hidden: Tensor, block_ids: Tensor, start: int) -> Tensor:
        """Features [1, t, L, H] of the tokens kept since the last call, block [1, K] -> logits [1, K-1, V]."""
        ...


@dataclass(frozen=True)
class Generation:
    """What was generated for one prompt, and what it cost.

    tokens    generated ids, the end token included
    accepted  for each block: drafted tokens that were right, counted up to the end token
    offered   for each block: drafted tokens that could have been right (fewer when the text ended inside the block)
    """

    tokens: list[int]
    target_forwards: int
    seconds: float
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)


def greedy_generate(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: Generator | None = None,
) -> Generation:
    """The plain baseline: one target forward a token, stopping at the target's end tokens or `max_new_tokens`."""
    _check_request(prompt_ids, max_new_tokens, temperature)
    start = time.perf_counter()
    tokens: list[int] = []
    with torch.inference_mode():
        session = TargetSession(target, [])
        last = session.append(prompt_ids).last
        while True:
            tokens.append(_pick(target.logits(last[-1]), temperature, generator))
            if tokens[-1] in target.eos_token_ids or len(tokens) == max_new_tokens:
                break
            last = session.append(tokens[-1:]).last
    return Generation(tokens, session.forwards, time.perf_counter() - start)


def speculative_generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: Generator | None = None,
) -> Generation:
    """The target's own text (temperature 0) or distribution (> 0), in fewer target forwards.

    Greedy output equals `greedy_generate` token for token wherever the target's two best logits differ by more than
    the rounding between a forward of one token and one of a block; compare in float32.
    """
    _check_request(prompt_ids, max_new_tokens, temperature)
    check_rollback(target)
    start = time.perf_counter()
    with torch.inference_mode():
        run = _Run(target, drafter, temperature, generator)
        run.prefill(prompt_ids)
        while not run.finished(max_new_tokens):
            run.step()
    seconds = time.perf_counter() - start
    return Generation(run.tokens[:max_new_tokens], run.session.forwards, seconds, run.accepted, run.offered)


class _Run:
    """The state of one speculative generation."""

    def __init__(self, target: Target, drafter: Drafter, temperature: float, generator: Generator | None) -> None:
        self.target, self.drafter = target, drafter
        self.temperature, self.generator = temperature, generator
        self.session = TargetSession(target, drafter.target_layer_ids)
        self.cache = drafter.new_cache()
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self.offered: list[int] = []

    def prefill(self, prompt_ids: Sequence[int]) -> None:
        features = self.session.append(prompt_ids)
        self.new_hidden = features.hidden
        self.tokens.append(_pick(self.target.logits(features.last[-1]), self.temperature, self.generator))

    def finished(self, max_new_tokens: int) -> bool:
        return len(self.tokens) >= max_new_tokens or self.tokens[-1] in self.target.eos_token_ids

    def step(self) -> None:
        """Drafts a block after the last token, checks it, keeps the part that is right and one token more."""
        size, anchor = self.drafter.block_size, self.tokens[-1]
        block = torch.full((1, size), self.drafter.mask_token_id, device=self.target.device)
        block[0, 0] = anchor
        logits = self.drafter.draft(self.cache, self.new_hidden[None], block, self.session.length)[0]
        draft_logits = logits[: self.session.room - 1]  # the target's last position ends the last block early
        choose = self._greedy if self.temperature == 0 else self._sampled
        drafted, verify = choose(draft_logits)
        features = self.session.append([anchor, *drafted])
        n_accepted, bonus = verify(features)
        self._record([*drafted[:n_accepted], bonus], n_accepted, len(drafted))
        self.session.keep(n_accepted + 1)
        self.new_hidden = features.hidden[: n_accepted + 1]

    def _record(self, emitted: list[int], n_accepted: int, offered: int) -> None:
        ends = [i for i, token in enumerate(emitted) if token in self.target.eos_token_ids]
        if ends and ends[0] < n_accepted:  # what was drafted after the end of the text says nothing
            n_accepted = offered = ends[0] + 1
        self.tokens += emitted[: ends[0] + 1] if ends else emitted
        self.accepted.append(n_accepted)
        self.offered.append(offered)

    def _greedy(self, draft_logits: Tensor) -> tuple[list[int], Callable[[Features], tuple[int, int]]]:
        drafted: list[int] = draft_logits.argmax(-1).tolist()

        def verify(features: Features) -> tuple[int, int]:
            return accept_greedy(drafted, self.target.logits(features.last).argmax(-1).tolist())

        return drafted, verify

    def _sampled(self, draft_logits: Tensor) -> tuple[list[int], Callable[[Features], tuple[int, int]]]:
        draft_probs = _probabilities(draft_logits, self.temperature)
        drafted = torch.multinomial(draft_probs, 1, generator=self.generator)[:, 0]

        def verify(features: Features) -> tuple[int, int]:
            target_probs = _probabilities(self.target.logits(features.last), self.temperature)
            return accept_sampled(drafted, draft_probs, target_probs, self.generator)

        return drafted.tolist(), verify


def accept_greedy(drafted: list[int], own: list[int]) -> tuple[int, int]:
    """How many of K-1 drafted tokens match the target's own K choices, and the target's token after those."""
    n = 0
    while n < len(drafted) and drafted[n] == own[n]:
        n += 1
    return n, own[n]


def accept_sampled(
    drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: Generator | None
) -> tuple[int, int]:
    """Rejection rule: drafted [K-1] from draft_probs [K-1, V], target_probs [K, V] -> (accepted, next token).

    The tokens emitted are distributed exactly as if drawn from the target (arXiv 2211.17192, appendix A.1).
    """
    k = len(drafted)
    slots = torch.arange(k, device=drafted.device)
    ratio = target_probs[slots, drafted] / draft_probs[slots, drafted]
    draws = torch.rand(k, generator=generator, device=drafted.device)
    rejected = (draws >= ratio).nonzero()
    n = int(rejected[0]) if len(rejected) else k
    rest = target_probs[n] if n == k else (target_probs[n] - draft_probs[n]).clamp(min=0)
    if not bool(rest.any()):  # equal up to rounding: what is left over is rounding too
        rest = target_probs[n]
    return n, int(torch.multinomial(rest, 1, generator=generator))


def _pick(logits: Tensor, temperature: float, generator: Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax(-1))
    return int(torch.multinomial(_probabilities(logits, temperature), 1, generator=generator))


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.float() / temperature, -1)


def _check_request(prompt_ids: Sequence[int], max_new_tokens: int, temperature: float) -> None:
    if len(prompt_ids) == 0:
        raise DataError("a prompt of at least one token", "an empty one", "leave it out")
    if max_new_tokens < 1:
        raise ConfigError("at least one new token", str(max_new_tokens), "raise max_new_tokens")
    if temperature < 0:
        raise ConfigError("a temperature of 0 or more", str(temperature), "0 means greedy")
