"""The format of the vLLM project's speculators: the drafter's tensors, the target's embedding and head, nested config.

Fields as in vllm-project/speculators models/dflash/config.py and config.py; its layer ids count the embedding's output
as 0, so they are ours + 1.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from dflash.drafter.model import DFlashDrafter
from dflash.errors import CheckpointError
from dflash.export.files import (
    build,
    drafter_weights,
    load_weights,
    need,
    read_config,
    read_tensors,
    weights_dtype,
    write_files,
)
from dflash.export.qwen3_fields import from_fields, to_fields
from dflash.target import Target

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def write_speculators(drafter: DFlashDrafter, target: Target, directory: Path | str) -> None:
    """Writes the drafter in speculators' format with the target's embedding and head. OutputError: in use, or full."""
    weights = drafter_weights(drafter)
    verifier = {"name_or_path": str(target.path), "architectures": list(target.model.config.architectures or [])}
    layers = {"model_type": "qwen3", **to_fields(drafter.config), "num_target_layers": target.n_layers}
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.block_size - 1}],
            "verifier": verifier,
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": [i + 1 for i in drafter.target_layer_ids],
        "draft_vocab_size": drafter.config.vocab_size,
        "target_hidden_size": None,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not getattr(drafter.config, "sliding_causal_block", True),
        "tie_word_embeddings": False,
        "dtype": weights_dtype(weights),
    }
    write_files(Path(directory), fields, {**weights, EMBEDDING: target.embedding, HEAD: target.head})


def read_speculators(directory: Path | str) -> DFlashDrafter:
    """Reads a drafter in speculators' format, bound to its embedding and head where it has them. CheckpointError."""
    directory = Path(directory)
    fields = read_config(directory)
    layers = need(fields, "transformer_layer_config", dict, directory)
    _check_supported(fields, layers, directory)
    config = from_fields(layers, str(directory))
    config.num_target_layers = layers.get("num_target_layers")
    config.sliding_causal_block = not fields.get("sliding_window_non_causal", False)
    ids = [i - 1 for i in need(fields, "aux_hidden_state_layer_ids", list, directory)]
    size, mask = (need(fields, name, int, directory) for name in ("block_size", "mask_token_id"))
    drafter = build(config, ids, size, mask, directory)
    tensors = read_tensors(directory)
    embedding, head = tensors.pop(EMBEDDING, None), tensors.pop(HEAD, None)
    load_weights(drafter, tensors, directory)
    if embedding is not None:
        _bind(drafter, embedding, head, directory)
    return drafter


def _bind(drafter: DFlashDrafter, embedding: Tensor, head: Tensor | None, directory: Path) -> None:
    if head is None:
        raise CheckpointError(f"{HEAD} beside {EMBEDDING}", "none", "export the drafter again", where=str(directory))
    wanted = (drafter.config.vocab_size, drafter.config.hidden_size)
    for name, tensor in ((EMBEDDING, embedding), (HEAD, head)):
        if tuple(tensor.shape) != wanted:
            got = str(list(tensor.shape))
            raise CheckpointError(f"{name} of {list(wanted)}", got, "config and weights differ", where=str(directory))
    drafter.bind_target(embedding, head)


def _check_supported(fields: dict[str, Any], layers: dict[str, Any], directory: Path) -> None:
    """The format holds more kinds of drafter than this one; each difference is an error, never ignored."""
    vocab_size = layers.get("vocab_size")
    wanted = {
        "speculators_model_type": "dflash",
        "sample_from_anchor": False,
        "draft_vocab_size": vocab_size,
        "projector_type": "dflash",
    }
    for name, value in wanted.items():
        if fields.get(name, value) != value or (name == "speculators_model_type" and name not in fields):
            got = f"{name} {fields.get(name)!r}"
            raise CheckpointError(f"{name} {value!r}", got, "other kinds are not supported", where=str(directory))
    if fields.get("target_hidden_size") not in (None, layers.get("hidden_size")):
        got = str(fields["target_hidden_size"])
        raise CheckpointError("target_hidden_size none or the drafter's", got, "not supported", where=str(directory))
