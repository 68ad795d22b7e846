"""The decoder's own configuration, spelled so that transformers 4 and 5, and servers of either age, read the same."""

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

from dflash.errors import CheckpointError

# without one of these a reader would silently take Qwen3's default
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
OPTIONAL = (
    "hidden_act",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def to_fields(config: Qwen3Config) -> dict[str, Any]:
    """JSON fields of a drafter's configuration.

    transformers 5 keeps theta, scaling and partial rotary in `rope_parameters`; older readers know only the three
    separate fields and fall back to a theta of 10000 without them, so both spellings are written.
    """
    fields = {name: getattr(config, name) for name in (*REQUIRED, *OPTIONAL)}
    rope = dict(config.rope_parameters)
    fields["rope_parameters"], fields["rope_theta"] = rope, rope["rope_theta"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    fields["tie_word_embeddings"] = False
    return fields


def from_fields(fields: Mapping[str, Any], where: str) -> Qwen3Config:
    """The drafter's configuration from JSON fields; CheckpointError names a field that is missing."""
    missing = [name for name in REQUIRED if fields.get(name) is None]
    rope = _rope_parameters(fields)
    if missing or rope is None:
        got = f"none of {missing[0] if missing else 'rope_parameters or rope_theta'}"
        raise CheckpointError("a complete Qwen3 configuration", got, "export the drafter again", where=where)
    if fields.get("attention_bias"):
        raise CheckpointError("attention without biases", "attention_bias true", "not supported here", where=where)
    known = {name: fields[name] for name in (*REQUIRED, *OPTIONAL) if name in fields}
    return Qwen3Config(**known, rope_parameters=rope, tie_word_embeddings=False)


def _rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = fields.get("rope_theta")
    if rope["rope_theta"] is None:
        return None
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    if fields.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    return rope
