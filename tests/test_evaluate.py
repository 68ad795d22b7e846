"""Evaluation counts what decoding really did, and leaves the drafter as it found it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dflash.decode import Generation, greedy_generate
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.errors import DataError
from dflash.evaluate import conditional_acceptance, evaluate, evaluating, summarize
from dflash.outcome import evaluation_rows, repeated_layers
from dflash.target import Target, choose_layer_ids
from tests.conftest import TargetMaker
from tests.test_decode import FAMILIES, PROMPT, ScriptedDrafter, load

OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
PROMPTS = [PROMPT, PROMPT[::-1], PROMPT[2:]]


def untrained(target: Target, layers: int = 2, block_size: int = 4) -> DFlashDrafter:
    config = create_drafter_config(target.config, num_draft_layers=layers)
    drafter = DFlashDrafter(config, choose_layer_ids(target.n_layers, 3), block_size, 8, mask_token_id=3)
    drafter.bind_target(target.embedding, target.head)
    return drafter


def twin_with(drafter: DFlashDrafter, target: Target, change: dict[str, Any]) -> DFlashDrafter:
    """The same weights under another configuration."""
    config = create_drafter_config(target.config, num_draft_layers=2)
    config.update(change)
    twin = DFlashDrafter(config, drafter.target_layer_ids, drafter.block_size, 8, mask_token_id=3)
    twin.load_state_dict(drafter.state_dict())
    twin.bind_target(target.embedding, target.head)
    return twin


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_untrained_drafter_leaves_every_text_identical(make_target_dir: TargetMaker, kind: str) -> None:
    target = load(make_target_dir, kind)
    result = evaluate(target, untrained(target), PROMPTS, max_new_tokens=12)
    assert result.identical == result.prompts == 3
    assert 1.0 <= result.tau < 2.0
    assert result.speedup is not None
    assert result.speedup > 0


def test_a_drafter_that_knows_the_text_reaches_the_whole_block(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    script = PROMPT + greedy_generate(target, PROMPT, max_new_tokens=41).tokens
    done: list[tuple[int, int]] = []
    drafter = ScriptedDrafter(target, script, wrong=0)
    result = evaluate(target, drafter, [PROMPT], max_new_tokens=41, progress=lambda *at: done.append(at))
    assert result.tau == 5.0
    assert result.conditional_acceptance == (1.0,) * 4
    assert result.tokens_per_target_forward == 41 / 9
    assert done == [(1, 1)]


def test_tau_is_the_mean_matching_prefix_plus_one_and_not_a_product_of_marginals() -> None:
    run = Generation([0] * 8, 5, 1.0, accepted=[3, 0, 0, 3], offered=[3, 3, 3, 3])
    result = summarize([run], [], 3)
    assert result.tau == 2.5
    assert result.conditional_acceptance == (0.5, 1.0, 1.0)  # marginals are all 0.5: their product gives tau 1.875
    assert result.speedup is None
    assert result.identical is None


def test_slots_after_the_end_of_the_text_do_not_count_as_wrong() -> None:
    assert conditional_acceptance([2, 3], [2, 3], 3) == (1.0, 1.0, 1.0)
    assert conditional_acceptance([2, 3], [3, 3], 3) == (1.0, 1.0, 0.5)


def test_a_text_that_differs_is_not_counted_as_identical() -> None:
    run = Generation([1, 2, 3], 2, 1.0, [2], [3])
    plain = Generation([1, 2, 3], 3, 2.0)
    assert summarize([run], [plain], 3).identical == 1
    assert summarize([run], [replace(plain, tokens=[1, 2, 4])], 3).identical == 0
    assert summarize([run], [plain], 3).speedup == 2.0


def test_a_drafter_that_slows_decoding_down_is_said_to_and_one_that_does_not_is_not() -> None:
    run, plain = Generation([1, 2, 3], 2, 1.0, [2], [3]), Generation([1, 2, 3], 3, 2.0)
    slower, faster = (dict(evaluation_rows(summarize([a], [b], 3))) for a, b in ((plain, run), (run, plain)))
    assert slower["verdict"].startswith("slower here with this drafter than without one: ")
    assert "verdict" not in faster
    assert faster["same as greedy"] == "1 of 1 prompt, token for token"


def test_layers_that_are_read_twice_are_named_with_a_number_that_reads_none_twice() -> None:
    assert "--drafter.features 1 reads no" in repeated_layers(choose_layer_ids(4, 3), 4)
    assert "--drafter.features 2 reads no" in repeated_layers(choose_layer_ids(5, 4), 5)
    assert repeated_layers(choose_layer_ids(36, 5), 36) == ""


def test_evaluating_restores_the_mode_of_every_module_even_after_an_error() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module.train()
    module[0].eval()
    stopped = False
    try:
        with evaluating(module):  # type: ignore[arg-type]
            assert not any(m.training for m in module.modules())
            raise RuntimeError("stop")
    except RuntimeError:
        stopped = True
    assert stopped
    assert [m.training for m in module.modules()] == [True, False, True]


def test_evaluation_puts_the_drafter_back_into_training_and_changes_no_weight(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    drafter = untrained(target).train()
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    evaluate(target, drafter, [PROMPT], max_new_tokens=6)
    assert drafter.training
    assert all(torch.equal(before[name], weight) for name, weight in drafter.state_dict().items())
    assert all(weight.grad is None for weight in drafter.parameters())


def test_evaluating_nothing_is_refused(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    with pytest.raises(DataError, match="held-out"):
        evaluate(target, untrained(target), [], max_new_tokens=4)


def test_a_prompt_longer_than_the_drafters_position_table_is_drafted_as_with_a_long_one(
    make_target_dir: TargetMaker,
) -> None:
    target = load(make_target_dir)
    drafter = untrained(target)
    short, other = (twin_with(drafter, target, change) for change in ({"max_position_embeddings": 16}, OTHER_ROPE))
    prompt = PROMPT * 20
    features = target.features(torch.tensor(prompt), drafter.target_layer_ids)
    block = torch.tensor([[5, 3, 3, 3]])
    drafts = [d.draft(d.new_cache(), features.hidden[None], block, len(prompt)) for d in (drafter, short, other)]
    assert torch.equal(drafts[0], drafts[1])
    assert not torch.allclose(drafts[0], drafts[2], atol=1e-3)  # positions do matter here
