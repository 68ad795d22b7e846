"""Tiny random targets of several families, with a tokenizer and a chat template that marks what the assistant says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
CORPUS = (
    "def area(width: int, height: int) -> int: return width * height",
    "The quick brown fox jumps over the lazy dog, and the user asks the assistant to explain why.",
    "List the parameters of the function. system user assistant: a sorted list of names, one a line.",
    "Describe the signature as JSON: {\"name\": \"open\", \"parameters\": [\"path\", \"mode\"]}",
)
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
TargetMaker = Callable[..., Path]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 384 tokens trained on a few lines, so that it can spell anything."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator(CORPUS * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|im_end|>", mask_token="<|mask|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_config(kind: str, tokenizer: PreTrainedTokenizerFast, n_layers: int) -> PreTrainedConfig:
    """The configuration of a tiny target: llama, qwen2, qwen3, qwen3-untied, qwen3-sliding, qwen3-next, ..."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {**SMALL, "vocab_size": len(tokenizer), "num_hidden_layers": n_layers, **ids}
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    linear["linear_num_value_heads"] = 4
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    if kind == "llama":
        return LlamaConfig(**shape, intermediate_size=128, tie_word_embeddings=False, rope_parameters=rope)
    if kind == "gemma2":
        return Gemma2Config(**shape, head_dim=16, intermediate_size=128)
    if kind == "lfm2":  # short convolutions and attention, one or the other a layer
        kinds = [("conv", "full_attention")[i % 2] for i in range(n_layers)]
        return Lfm2Config(**shape, intermediate_size=96, layer_types=kinds, block_auto_adjust_ff_dim=False)
    if kind == "falcon-h1":  # a state-space model and attention, both in every layer
        mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
        return FalconH1Config(**shape, **mamba, intermediate_size=96)
    if kind == "qwen2":
        return Qwen2Config(**shape, intermediate_size=128, tie_word_embeddings=True, rope_parameters=rope)
    if kind.startswith("qwen3-next"):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        experts["shared_expert_intermediate_size"] = 32
        return Qwen3NextConfig(**shape, **linear, **experts, head_dim=16, intermediate_size=128)
    if kind.startswith("qwen3.5"):
        return Qwen3_5TextConfig(**shape, **linear, head_dim=16, intermediate_size=128)
    sliding = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": n_layers // 2}
    extra = sliding if kind == "qwen3-sliding" else {}
    tied = kind != "qwen3-untied"
    return Qwen3Config(
        **shape, **extra, head_dim=16, intermediate_size=128, tie_word_embeddings=tied, rope_parameters=rope
    )


MODELS: dict[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "lfm2": Lfm2ForCausalLM,
    "falcon-h1": FalconH1ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3-untied": Qwen3ForCausalLM,
    "qwen3-sliding": Qwen3ForCausalLM,
    "qwen3-next": Qwen3NextForCausalLM,
    "qwen3.5": Qwen3_5ForCausalLM,
}


def build_target(directory: Path, kind: str = "qwen3", n_layers: int = 6, seed: int = 0) -> Path:
    """Writes a random target of the family `kind`, wide enough weights to make its greedy text vary."""
    tokenizer = build_tokenizer()
    config = build_config(kind, tokenizer, n_layers)
    config.initializer_range = 0.15
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[kind](config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms of exactly one would hide a norm that is missing or applied twice
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def make_target_dir(tmp_path_factory: pytest.TempPathFactory) -> TargetMaker:
    """Builds a tiny target once for each (kind, n_layers, seed) of the session and returns its directory."""
    built: dict[tuple[str, int, int], Path] = {}

    def make(kind: str = "qwen3", n_layers: int = 6, seed: int = 0) -> Path:
        key = (kind, n_layers, seed)
        if key not in built:
            built[key] = build_target(tmp_path_factory.mktemp("target"), kind, n_layers, seed)
        return built[key]

    return make


@pytest.fixture(scope="session")
def tiny_target_dir(make_target_dir: TargetMaker) -> Path:
    """A random Qwen3 of 6 layers, width 64, tied embeddings, with tokenizer and chat template."""
    return make_target_dir()
