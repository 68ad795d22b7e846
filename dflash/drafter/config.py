"""The drafter's configuration: Qwen3-style blocks shaped after the target, whatever the target's family."""

import copy
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from dflash.errors import TargetError

FULL, SLIDING = "full_attention", "sliding_attention"


def create_drafter_config(
    target_config: PretrainedConfig,
    num_draft_layers: int = 5,
    sliding_window: int | None = None,
    sliding_causal_block: bool = True,
) -> Qwen3Config:
    """Builds the drafter's Qwen3Config from the target's (its text part when multimodal).

    `sliding_window` (tokens): every layer then sees only the last W positions of context, and attends causally inside
    a block unless `sliding_causal_block` is false. Errors: TargetError. Source: arXiv 2602.06036, section 4.
    """
    text = target_config.get_text_config()
    heads = text.num_attention_heads
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate_size(text),
        num_hidden_layers=num_draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=_rope_parameters(text),
        tie_word_embeddings=False,
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        layer_types=[FULL if sliding_window is None else SLIDING] * num_draft_layers,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    config.num_target_layers = text.num_hidden_layers
    config.sliding_causal_block = sliding_causal_block
    return config


def _rope_parameters(text: Any) -> dict[str, Any]:
    """The target's own rope parameters: theta, scaling and partial rotary; never a default."""
    rope = getattr(text, "rope_parameters", None)
    if rope and FULL in rope:  # one set a layer type: the drafter's context is the full one's
        rope = rope[FULL]
    if not rope or rope.get("rope_theta") is None:
        raise TargetError(
            "rope_parameters with rope_theta in the target's config",
            repr(rope),
            "the drafter shares the target's positions",
        )
    kept: dict[str, Any] = copy.deepcopy(dict(rope))
    kept.setdefault("rope_type", "default")
    # three equal axes for text: multimodal sections change nothing, and other loaders refuse the unknown keys
    kept.pop("mrope_section", None)
    kept.pop("mrope_interleaved", None)
    return kept


def _intermediate_size(text: Any) -> int:
    """Width of the MLP; mixtures of experts that have no dense one get three times the width."""
    size = getattr(text, "intermediate_size", None)
    return int(size) if size else 3 * int(text.hidden_size)
