"""The drafter as a module: what is trained, what is frozen, and the traps others fell into."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash.drafter.anchors import Anchors
from dflash.drafter.blocks import PlainRows, cut_blocks, document_ids_from_lengths
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import CrossEntropy, KLDivergence
from dflash.errors import ConfigError, DataError, TargetError
from dflash.features import Features
from dflash.target import Target
from tests.drafter.parts import LAYER_IDS, MASK, VOCABULARY, WIDTH, draw, make_drafter, make_features, make_rows
from tests.drafter.parts import target_config as small_target

ZLAB_LAYER = {
    *(f"{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")),
    *(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")),
}


def step(drafter: DFlashDrafter, rows: PlainRows) -> tuple[Tensor, dict[str, Tensor]]:
    drafter.zero_grad()
    out = drafter.terms(rows, make_features(rows), draw(rows, drafter), CrossEntropy())
    out.loss_sum.backward()
    return out.loss_sum.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


def test_weights_carry_the_checkpoints_names_and_the_targets_are_not_among_them() -> None:
    drafter = make_drafter(layers=2)
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.{i}.{name}" for i in range(2) for name in ZLAB_LAYER}
    assert set(drafter.state_dict()) == expected
    assert {n for n, _ in drafter.named_parameters()} == expected
    assert len(list(drafter.trainable_parameters())) == len(expected)


def test_every_trainable_weight_gets_a_gradient_and_the_target_none() -> None:
    drafter = make_drafter()
    _, gradients = step(drafter, make_rows([[30]], 30))
    assert set(gradients) == set(drafter.state_dict())
    assert all(g.abs().sum() > 0 for g in gradients.values())
    assert drafter.embed_tokens is not None
    assert not drafter.embed_tokens.requires_grad


def test_building_a_drafter_draws_nothing_from_the_global_generator_and_is_repeatable() -> None:
    before = torch.random.get_rng_state()
    one, two = make_drafter(), make_drafter()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    two.reset_parameters(torch.Generator().manual_seed(5))
    assert not torch.equal(one.fc.weight, two.fc.weight)


def test_a_tied_target_gives_the_drafter_its_embedding_as_head_also_after_a_move() -> None:
    drafter = make_drafter()
    embedding = torch.randn(VOCABULARY, WIDTH)
    drafter.bind_target(embedding)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(drafter.logits(x), x @ embedding.T)
    drafter.to(torch.float64)
    torch.testing.assert_close(drafter.logits(x.double()), x.double() @ embedding.double().T)


def test_an_untied_target_gives_its_head() -> None:
    drafter = make_drafter()
    head = torch.randn(VOCABULARY, WIDTH)
    drafter.bind_target(torch.zeros(VOCABULARY, WIDTH), head)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(drafter.logits(x), x @ head.T)


def test_a_target_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(TargetError, match="embedding"):
        make_drafter().bind_target(torch.zeros(VOCABULARY + 1, WIDTH))


@pytest.mark.parametrize(
    ("mask_token_id", "got"), [(None, "none"), (VOCABULARY, str(VOCABULARY)), (-1, "-1"), (2, "pad")]
)
def test_a_mask_token_that_is_missing_outside_the_vocabulary_or_the_pad_is_refused(
    mask_token_id: int | None, got: str
) -> None:
    config = create_drafter_config(small_target(), 1)
    config.pad_token_id = 2
    with pytest.raises(ConfigError, match=got):
        DFlashDrafter(config, LAYER_IDS, 4, 4, mask_token_id)


@pytest.mark.parametrize("layer_ids", [(), (6,), (-1,)])
def test_layer_ids_outside_the_target_are_refused(layer_ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="layer ids"):
        DFlashDrafter(create_drafter_config(small_target(), 1), layer_ids, 4, 4, MASK)


def test_slot_k_is_the_mask_token_at_position_anchor_plus_k_and_learns_the_token_there() -> None:
    rows = make_rows([[8, 12]], 20)
    anchors = Anchors(torch.tensor([[2, 11, 0]]), torch.tensor([[True, True, False]]))
    blocks = cut_blocks(rows, anchors, 4, MASK)
    assert blocks.ids[0, 0].tolist() == [int(rows.input_ids[0, 2]), MASK, MASK, MASK]
    assert blocks.position_ids[0, :2].tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert blocks.labels[0, 1].tolist() == rows.input_ids[0, 12:15].tolist()
    assert blocks.valid[0].tolist() == [[True] * 3, [True] * 3, [False] * 3]


def test_slots_past_the_documents_end_or_unsupervised_do_not_count() -> None:
    rows = make_rows([[5, 5]], 10)
    rows.loss_mask[0, 8] = False
    anchors = Anchors(torch.tensor([[3, 7, 9]]), torch.ones(1, 3, dtype=torch.bool))
    valid = cut_blocks(rows, anchors, 4, MASK).valid
    assert valid[0].tolist() == [[True, False, False], [False, True, False], [False, False, False]]


def test_a_batch_with_no_valid_anchor_gives_zero_loss_and_finite_zero_gradients() -> None:
    drafter = make_drafter(block_size=8)
    rows = make_rows([[5]], 20)
    loss, gradients = step(drafter, rows)
    assert float(loss) == 0.0
    assert set(gradients) == set(drafter.state_dict())
    assert not any(g.any() for g in gradients.values())
    mean, _ = drafter(*features_and_ids(rows), lengths=torch.tensor([5]))
    assert float(mean.detach()) == 0.0


def features_and_ids(rows: PlainRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    features = make_features(rows)
    return features.hidden, features.last, rows.input_ids, rows.loss_mask


def test_checkpointed_layers_give_the_same_loss_and_gradients_bit_for_bit() -> None:
    drafter, rows = make_drafter(), make_rows([[30, 9]], 40)
    loss, gradients = step(drafter, rows)
    drafter.checkpoint_layers = True
    before = torch.random.get_rng_state()
    again, recomputed = step(drafter, rows)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[n], recomputed[n]) for n in gradients)


def test_a_sliding_window_changes_what_is_computed_on_a_long_context_and_not_on_a_short_one() -> None:
    full, sliding = make_drafter(), make_drafter(window=6, causal=False)
    sliding.load_state_dict(full.state_dict())
    rows = make_rows([[30]], 30)
    features = make_features(rows)
    short = Anchors(torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.bool))
    long = Anchors(torch.tensor([[20]]), torch.ones(1, 1, dtype=torch.bool))

    def hidden(drafter: DFlashDrafter, anchors: Anchors) -> Tensor:
        return drafter.block_hidden(rows, features.hidden, anchors, cut_blocks(rows, anchors, 4, MASK))

    torch.testing.assert_close(hidden(full, short), hidden(sliding, short))
    assert not torch.allclose(hidden(full, long), hidden(sliding, long), atol=1e-3)


def train_a_norm(drafter: DFlashDrafter, rows: PlainRows, dtype: torch.dtype) -> None:
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-4, weight_decay=0.0)
    features = make_features(rows)
    features = Features(features.hidden.to(dtype), features.last.to(dtype))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = drafter.terms(rows, features, draw(rows, drafter), CrossEntropy())
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()


def test_float32_masters_let_norms_leave_one_under_bfloat16_compute_where_bfloat16_weights_stay() -> None:
    rows = make_rows([[30]], 30)
    config = create_drafter_config(small_target(), 2)
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        drafter = DFlashDrafter(config, LAYER_IDS, 4, 8, MASK)
        drafter.bind_target(torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)))
        drafter.to(dtype)
        train_a_norm(drafter, rows, torch.bfloat16)
        assert all(p.dtype == dtype for p in drafter.parameters())
        norms = torch.cat([p.detach() for n, p in drafter.named_parameters() if n.endswith("norm.weight")])
        moved[dtype] = float((norms != 1.0).float().mean())
    assert moved[torch.float32] > 0.9
    assert moved[torch.bfloat16] < 0.1  # the trap itself


def test_bfloat16_compute_is_close_to_float32() -> None:
    drafter, rows = make_drafter(), make_rows([[30]], 30)
    exact = drafter.terms(rows, make_features(rows), draw(rows, drafter), CrossEntropy()).metrics.loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = drafter.terms(rows, make_features(rows), draw(rows, drafter), CrossEntropy()).metrics.loss
    assert float(rounded) == pytest.approx(float(exact), rel=0.03)
    assert float(rounded) != float(exact)


def test_the_mode_changes_nothing_and_drafting_leaves_it_alone() -> None:
    drafter, rows = make_drafter(), make_rows([[30]], 30)
    training = step(drafter, rows)[0]
    drafter.draft(drafter.new_cache(), make_features(rows).hidden[:, :5], torch.full((1, 4), MASK), 5)
    assert drafter.training
    drafter.eval()
    assert torch.equal(step(drafter, rows)[0], training)
    drafter.draft(drafter.new_cache(), make_features(rows).hidden[:, :5], torch.full((1, 4), MASK), 5)
    assert not drafter.training


def test_teacher_logits_are_the_targets_own_one_position_back_final_norm_once(tiny_target_dir: Path) -> None:
    target = Target.load(tiny_target_dir, torch.float32, "cpu")
    drafter = DFlashDrafter(create_drafter_config(target.config, 1), [1], 4, 2, int(target.tokenizer.mask_token_id))
    drafter.bind_target(target.embedding, target.head)
    ids = torch.tensor(target.tokenizer("def area(width: int, height: int)")["input_ids"])
    with torch.no_grad():
        expected = target.model(ids[None]).logits[0]
    anchors = Anchors(torch.tensor([[2, 5]]), torch.ones(1, 2, dtype=torch.bool))
    teacher = drafter._teacher(target.features(ids, [1]).last[None], anchors)
    for n, anchor in enumerate((2, 5)):
        for k in (1, 2, 3):  # slot k is token anchor + k, which the target predicts at anchor + k - 1
            torch.testing.assert_close(teacher[0, n, k - 1], expected[anchor + k - 1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(teacher[0, 0, 0], expected[3], atol=1e-1)


def test_kl_trains_towards_the_target_and_ce_towards_the_data() -> None:
    drafter, rows = make_drafter(), make_rows([[30]], 30)
    features, anchors = make_features(rows), draw(make_rows([[30]], 30), drafter)
    before = {o.name: drafter.terms(rows, features, anchors, o).metrics.loss for o in (KLDivergence(), CrossEntropy())}
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        out = drafter.terms(rows, features, anchors, KLDivergence())
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
    after = {o.name: drafter.terms(rows, features, anchors, o).metrics.loss for o in (KLDivergence(), CrossEntropy())}
    assert float(after["kl"]) < 0.5 * float(before["kl"])
    assert float(after["ce"]) > 0.5 * float(before["ce"])


def test_documents_from_lengths_and_lengths_that_do_not_fit() -> None:
    ids = torch.zeros(1, 6, dtype=torch.int64)
    assert document_ids_from_lengths(torch.tensor([2, 3]), ids).tolist() == [[0, 0, 1, 1, 1, -1]]
    both = torch.zeros(2, 4, dtype=torch.int64)
    assert document_ids_from_lengths(torch.tensor([3, 4]), both).tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]
    with pytest.raises(DataError, match="lengths"):
        document_ids_from_lengths(torch.tensor([4, 3]), ids)


def test_a_context_that_does_not_reach_the_block_is_our_mistake() -> None:
    drafter, rows = make_drafter(), make_rows([[30]], 30)
    with pytest.raises(AssertionError, match="features"):
        drafter.draft(drafter.new_cache(), make_features(rows).hidden[:, :5], torch.full((1, 4), MASK), 6)
