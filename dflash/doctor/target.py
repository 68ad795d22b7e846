"""Checks of the target: conventions others got wrong (tied head, norms, layer ids, rope), measured on its outputs."""

from collections.abc import Iterator
from typing import Any

import torch

from dflash.doctor.base import Check, Subject, failed, passed, warned
from dflash.target import Target

# tokens of the probe: enough for layers to differ, few enough to cost nothing
PROBED = 12


def checks(subject: Subject) -> Iterator[Check]:
    """Head, vocabulary, positions, then what its layers give."""
    target, drafter = subject.target, subject.drafter
    yield head_check(target)
    yield vocabulary_check(target.vocab_size, _highest_token(target.tokenizer))
    yield rope_check(target.config, drafter.config)
    yield positions_check(subject.config.data.row_tokens, getattr(target.config, "max_position_embeddings", None))
    yield from convention_checks(target, list(drafter.target_layer_ids))
    token = drafter.mask_token_id
    text = target.tokenizer.convert_ids_to_tokens(token) if token < len(target.tokenizer) else None
    yield passed("mask token", f"{token} ({text or 'a row that no token uses'}), neither padding nor an end token")


def head_check(target: Target) -> Check:
    """A head said to be tied must be the embedding: else an untrained one was made up while loading."""
    said = bool(getattr(target.config, "tie_word_embeddings", False))
    tied = target.head.data_ptr() == target.embedding.data_ptr()
    if said and not tied:
        remedy = "download the model again, or set tie_word_embeddings to false when the head is its own"
        return failed("head", "config.json says tied, the head is another tensor than the embedding", remedy)
    return passed("head", "tied to the embedding" if tied else "a matrix of its own")


def vocabulary_check(rows: int, highest: int) -> Check:
    """Rows of the head beside the highest token id; models pad them to a round number."""
    if highest >= rows:
        found = f"a tokenizer with id {highest}, a head of {rows} rows"
        return failed("vocabulary", found, "use the tokenizer that belongs to the model")
    spare = rows - highest - 1
    return passed("vocabulary", f"{rows} rows, {spare} of them padding" if spare else f"{rows} rows, all used")


def rope_check(target: Any, drafter: Any) -> Check:
    """The drafter's positions must turn as the target's do: theta, scaling, partial rotary."""
    theirs, ours = _rope(target), _rope(drafter)
    different = sorted(key for key in theirs if ours.get(key) != theirs[key])
    if different:
        found = f"{different[0]}: {theirs[different[0]]} in the target, {ours.get(different[0])} in the drafter"
        return failed("rope", found, "report this: the drafter's config is made from the target's")
    return passed("rope", ", ".join(f"{key} {theirs[key]}" for key in sorted(theirs)))


def positions_check(row_tokens: int, limit: int | None) -> Check:
    """Rows no longer than the positions the target was made for."""
    if limit is not None and row_tokens > limit:
        found = f"rows of {row_tokens} tokens, a target of {limit} positions"
        return failed("positions", found, f"set --data.row-tokens to at most {limit}")
    return passed("positions", f"rows of {row_tokens} tokens, a target of {limit or 'any number of'} positions")


def convention_checks(target: Target, layer_ids: list[int]) -> Iterator[Check]:
    """Layer ids name outputs, raw; what the head reads has the final norm once: compared with transformers' own."""
    ids = torch.arange(min(PROBED, target.vocab_size), device=target.device)
    every = list(range(target.n_layers))
    features = target.features(ids, every)
    with torch.no_grad():
        model = target.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    yield layer_check(layer_ids, features.hidden, [state[0] for state in model.hidden_states])
    yield norm_check(features.last, features.hidden[:, -1], model.hidden_states[-1][0])


def layer_check(layer_ids: list[int], hidden: torch.Tensor, states: list[torch.Tensor]) -> Check:
    """hidden [T, layers, H] must be states[id + 1], the last layer aside: transformers norms that one."""
    wrong = [i for i in layer_ids if i + 1 < len(states) - 1 and not torch.equal(hidden[:, i], states[i + 1])]
    if wrong:
        found = f"layer {wrong[0]}'s output is not hidden_states[{wrong[0] + 1}]"
        return failed("layer ids", found, "report this model: its layers do not return what transformers says")
    return passed("layer ids", f"{layer_ids} of 0..{hidden.shape[1] - 1}: outputs, equal to hidden_states[id + 1]")


def norm_check(last: torch.Tensor, raw: torch.Tensor, normed: torch.Tensor) -> Check:
    """last [T, H] must be transformers' last entry, which is normed once, and must not be the raw output."""
    if not torch.allclose(last.float(), normed.float(), rtol=1e-3, atol=1e-3):
        found = "what the head reads is not transformers' last hidden state"
        return failed("final norm", found, "report this model: its norm sits elsewhere")
    if torch.allclose(last.float(), raw.float(), rtol=1e-3, atol=1e-3):
        return warned(
            "final norm", "the norm changes nothing: it is missing, or its input is normed already",
            "check that the model directory is the one that was trained",
        )  # fmt: skip
    return passed("final norm", "applied once before the head; features are taken before it")


def _highest_token(tokenizer: Any) -> int:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return max(vocabulary.values())


def _rope(config: Any) -> dict[str, Any]:
    """The rope parameters that turn text; one set a layer type: the full attention's."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    return {key: value for key, value in rope.items() if not key.startswith("mrope")}
