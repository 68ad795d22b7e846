"""The drafter's configuration follows the target's; rope most of all."""

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash.drafter.config import create_drafter_config
from dflash.drafter.rope import Rope, inverse_frequencies, rotate
from dflash.errors import TargetError
from tests.drafter.parts import target_config

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def test_theta_is_the_targets_and_never_a_default() -> None:
    config = create_drafter_config(target_config(theta=123456.0))
    assert config.rope_parameters["rope_theta"] == 123456.0
    frequencies, scaling = inverse_frequencies(config)
    assert frequencies[1] == pytest.approx(123456.0 ** (-2 / 8))
    assert scaling == 1.0
    assert not torch.allclose(frequencies, inverse_frequencies(create_drafter_config(target_config(10000.0)))[0])


def test_theta_of_a_config_written_before_transformers_5_is_kept() -> None:
    old = LlamaConfig.from_dict({"rope_theta": 5e5, "hidden_size": 64, "num_attention_heads": 4})
    assert create_drafter_config(old, 1).rope_parameters["rope_theta"] == 5e5


def test_a_target_without_rope_is_refused() -> None:
    config = target_config()
    config.rope_parameters = None
    with pytest.raises(TargetError, match="rope_theta"):
        create_drafter_config(config)


def test_partial_rotary_turns_only_its_share_of_the_head() -> None:
    config = create_drafter_config(target_config(partial=0.5))
    rotation = Rope(config)(torch.tensor([[3]]), torch.float32)
    x = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[..., :4], x[..., :4])


def test_partial_rotary_of_a_hybrid_target_is_kept() -> None:
    hybrid = Qwen3NextConfig(partial_rotary_factor=0.25, rope_theta=1e7)
    config = create_drafter_config(hybrid, 2)
    assert len(inverse_frequencies(config)[0]) == int(config.head_dim * 0.25) // 2


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, YARN], ids=["default", "yarn"])
def test_rotation_equals_the_targets_own(rope: dict[str, object]) -> None:
    target = target_config()
    target.rope_parameters = dict(rope)
    target.max_position_embeddings = 256
    position = torch.tensor([[0, 1, 17, 255]])
    x = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(target)(x, position)
    expected = apply_rotary_pos_emb(x, x, cos, sin)[0]
    got = rotate(x, Rope(create_drafter_config(target))(position, torch.float32))
    torch.testing.assert_close(got, expected)


def test_casting_the_drafter_leaves_frequencies_in_float32() -> None:
    rope = Rope(create_drafter_config(target_config())).to(torch.bfloat16)
    cos, _ = rope(torch.tensor([[1000]]), torch.float32)
    exact = (1000.0 * inverse_frequencies(create_drafter_config(target_config()))[0]).cos()
    torch.testing.assert_close(cos[0, 0, 0, :4], exact)


def test_a_target_with_a_rope_a_layer_type_gives_its_full_attention_one() -> None:
    config = create_drafter_config(Gemma3TextConfig(num_hidden_layers=6), 1)
    assert config.rope_parameters["rope_theta"] == 1_000_000.0


def test_shape_comes_from_the_target_and_embeddings_are_not_tied() -> None:
    target = Qwen3Config(
        hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True
    )
    config = create_drafter_config(target, 3)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 8, 2)
    assert (config.head_dim, config.num_hidden_layers, config.num_target_layers) == (24, 3, 32)
    assert config.tie_word_embeddings is False
    assert config.layer_types == ["full_attention"] * 3
    assert config.sliding_window is None


def test_a_sliding_window_makes_every_layer_slide_and_says_how_blocks_attend() -> None:
    config = create_drafter_config(target_config(), 2, sliding_window=16, sliding_causal_block=False)
    assert config.layer_types == ["sliding_attention"] * 2
    assert (config.sliding_window, config.sliding_causal_block) == (16, False)
    again = Qwen3Config.from_dict(config.to_dict())
    assert (again.sliding_window, again.sliding_causal_block) == (16, False)
