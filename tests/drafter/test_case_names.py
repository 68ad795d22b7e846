"""A script written against this signature runs with only sizes changed, and its wrapper sees every layer's call."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config

import dflash.drafter.model
from dflash import DFlashDrafter, create_drafter_config
from dflash.errors import DataError

WIDTH, TOKENS, LAYERS = 64, 200, 5


def target_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
    )


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "all_hidden_states": torch.randn(1, TOKENS, 5, WIDTH, generator=g).bfloat16(),
        "verifier_last_hidden": torch.randn(1, TOKENS, WIDTH, generator=g).bfloat16(),
        "input_ids": torch.randint(0, 500, (1, TOKENS), generator=g),
        "loss_mask": torch.ones(1, TOKENS, dtype=torch.bool),
        "lengths": torch.tensor([TOKENS]),
        "position_ids": torch.arange(1, TOKENS + 1)[None],
    }


def test_the_cases_script_runs_and_its_wrapped_attention_sees_every_layer_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = create_drafter_config(target_config(), num_draft_layers=LAYERS)
    drafter = DFlashDrafter(
        config, target_layer_ids=[1, 16, 31, 46, 61], block_size=32, max_anchors=8, mask_token_id=510
    ).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="no target bound"):
        plain, _ = drafter(**inputs(), use_soft_labels=True, gamma=10.0)
    original = dflash.drafter.model.flex_attention_forward
    calls: list[tuple[str, tuple[int, ...]]] = []

    def wrapped(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((type(module).__name__, tuple(query.shape)))
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setattr(dflash.drafter.model, "flex_attention_forward", wrapped)
    loss, metrics = drafter(**inputs(), use_soft_labels=True, gamma=10.0)
    loss.backward()
    assert calls == [("Attention", (1, 4, 8 * 32, 16))] * LAYERS
    assert torch.equal(loss, plain)
    assert torch.isfinite(loss)
    assert {"loss", "accuracy", "tau"} <= metrics.keys()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in drafter.parameters())


def test_positions_may_start_at_one_because_only_distances_count() -> None:
    config = create_drafter_config(target_config(), num_draft_layers=1)
    drafter = DFlashDrafter(config, [1, 16, 31, 46, 61], block_size=8, max_anchors=8, mask_token_id=510)
    drafter.bind_target(torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(3)))
    given = {k: v.float() if v.is_floating_point() else v for k, v in inputs().items()}
    from_one, _ = drafter(**given)
    from_zero, _ = drafter(**{**given, "position_ids": None})
    torch.testing.assert_close(from_one, from_zero, atol=1e-4, rtol=1e-4)


def test_lengths_of_packed_documents_keep_them_apart() -> None:
    config = create_drafter_config(target_config(), num_draft_layers=1)
    drafter = DFlashDrafter(config, [1, 16, 31, 46, 61], block_size=8, max_anchors=200, mask_token_id=510)
    drafter.bind_target(torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(3)))
    given = {k: v.float() if v.is_floating_point() else v for k, v in inputs().items()} | {"position_ids": None}
    together, whole = drafter(**given)
    apart, packed = drafter(**{**given, "lengths": torch.tensor([120, 80])})
    assert whole["blocks"] == TOKENS - 7
    assert packed["blocks"] == 120 - 7 + 80 - 7
    assert not torch.equal(together, apart)


@pytest.fixture
def drafter() -> DFlashDrafter:
    """Bound to a small random embedding."""
    config = create_drafter_config(target_config(), num_draft_layers=1)
    made = DFlashDrafter(config, [1, 16, 31, 46, 61], block_size=8, max_anchors=8, mask_token_id=510)
    made.bind_target(torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)))
    return made.bfloat16()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("all_hidden_states", lambda x: x[:, :, :1], r"all_hidden_states: expected a shape of .*, got"),
        ("all_hidden_states", lambda x: x[..., :-1], r"all_hidden_states: expected a shape of"),
        ("verifier_last_hidden", lambda x: x[:, :-1], r"verifier_last_hidden: expected a shape of"),
        ("input_ids", lambda x: x + 10**6, r"input_ids: expected token ids in 0\.\.\d+, got 1000\d+"),
        ("input_ids", lambda x: x - 10**6, r"input_ids: expected token ids in 0\.\.\d+, got -"),
        ("input_ids", lambda x: x.float(), r"input_ids: expected integer token ids, got torch.float32"),
        ("input_ids", lambda x: x[0], r"input_ids: expected input_ids \[B, T\]"),
        ("loss_mask", lambda x: x[:, :-1], r"loss_mask: expected a shape of"),
        ("loss_mask", lambda x: x.long() * 2, r"loss_mask: expected a mask of bool, or of 0 and 1"),
    ],
)
def test_inputs_of_another_shape_or_range_are_named(
    drafter: DFlashDrafter, name: str, change: Any, message: str
) -> None:
    given = inputs()
    with pytest.raises(DataError, match=message):
        drafter(**{**given, name: change(given[name])})


def test_a_mask_of_zeros_and_ones_trains_as_the_bool_one_does(drafter: DFlashDrafter) -> None:
    given = inputs()
    assert torch.equal(drafter(**given)[0], drafter(**{**given, "loss_mask": given["loss_mask"].long()})[0])
