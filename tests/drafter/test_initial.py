"""Initial weights from the target."""

import torch

from dflash.drafter.config import create_drafter_config
from dflash.drafter.initial import init_from_target
from dflash.drafter.model import DFlashDrafter
from dflash.target import Target
from tests.conftest import TargetMaker


def drafter_of(target: Target, layers: int) -> DFlashDrafter:
    return DFlashDrafter(create_drafter_config(target.config, layers), [1], 4, 4, int(target.tokenizer.mask_token_id))


def test_the_last_layers_and_the_final_norm_of_a_qwen3_target_are_copied(make_target_dir: TargetMaker) -> None:
    target = Target.load(make_target_dir("qwen3"), torch.float32, "cpu")
    drafter = drafter_of(target, 2)
    fc = drafter.fc.weight.clone()
    copied = init_from_target(drafter, target.model)
    decoder = target.model.model
    for index in range(2):
        source = dict(decoder.layers[4 + index].named_parameters())
        for name, weight in drafter.layers[index].named_parameters():
            torch.testing.assert_close(weight, source[name], rtol=1e-5, atol=1e-5)
            assert f"layers.{index}.{name}" in copied
    torch.testing.assert_close(drafter.norm.weight, decoder.norm.weight, rtol=1e-5, atol=1e-5)
    assert torch.equal(drafter.fc.weight, fc)


def test_a_norm_stored_minus_one_is_copied_as_the_factor_it_applies(make_target_dir: TargetMaker) -> None:
    target = Target.load(make_target_dir("qwen3-next"), torch.float32, "cpu")
    drafter = drafter_of(target, 1)
    assert "norm.weight" in init_from_target(drafter, target.model)
    x = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(drafter.norm(x), target.model.model.norm(x), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(drafter.norm.weight, target.model.model.norm.weight, atol=0.1)


def test_a_llama_target_leaves_the_query_and_key_norms_at_one(make_target_dir: TargetMaker) -> None:
    target = Target.load(make_target_dir("llama"), torch.float32, "cpu")
    drafter = drafter_of(target, 1)
    copied = init_from_target(drafter, target.model)
    assert "layers.0.self_attn.q_proj.weight" in copied
    assert "layers.0.self_attn.q_norm.weight" not in copied
    assert (drafter.get_parameter("layers.0.self_attn.q_norm.weight") == 1).all()
