"""Speculative decoding gives the target's own text, or its distribution, whatever the drafter proposes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from dflash.decode import accept_greedy, accept_sampled, greedy_generate, speculative_generate
from dflash.errors import ConfigError, DataError, TargetError
from dflash.session import TargetSession, check_rollback
from dflash.target import Target
from tests.conftest import TargetMaker

PROMPT = [5, 77, 130, 41, 200, 9, 61]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3-untied", "qwen3-sliding", "qwen3-next", "qwen3.5"]
CHI_SQUARE_999 = {7: 24.3, 15: 37.7}  # 99.9 % points by degrees of freedom


class ScriptedDrafter:
    """Proposes `script` by absolute position, wrong at every `wrong`-th position; checks what it is given."""

    def __init__(self, target: Target, script: list[int], wrong: int = 4, block_size: int = 5) -> None:
        self.block_size, self.mask_token_id, self.target_layer_ids = block_size, 3, [1, 4]
        self.script, self.wrong, self.vocab_size = script, wrong, target.vocab_size
        self.seen: list[Tensor] = []

    def new_cache(self) -> list[Tensor]:
        return []

    def draft(self, cache: Any, new_hidden: Tensor, block_ids: Tensor, start: int) -> Tensor:
        cache.append(new_hidden[0])
        self.seen = cache
        assert block_ids[0, 1:].eq(self.mask_token_id).all()
        assert block_ids[0, 0] == self.script[start]
        assert sum(len(h) for h in cache) == start  # every token before the anchor, the anchor itself not
        logits = torch.zeros(1, self.block_size - 1, self.vocab_size)
        for k in range(1, self.block_size):
            position = min(start + k, len(self.script) - 1)
            token = self.script[position]
            if self.wrong and position % self.wrong == 0:
                token = (token + 1) % self.vocab_size
            logits[0, k - 1, token] = 9.0
        return logits


def load(make: TargetMaker, kind: str = "qwen3") -> Target:
    target = Target.load(make(kind, 8 if kind in ("qwen3-next", "qwen3.5") else 6), torch.float32, "cpu")
    target.eos_token_ids = frozenset()  # random weights: never end by chance
    return target


@pytest.mark.parametrize("kind", [*FAMILIES, "lfm2", "falcon-h1"])
def test_speculative_output_is_the_targets_greedy_output(make_target_dir: TargetMaker, kind: str) -> None:
    target = load(make_target_dir, kind)
    plain = greedy_generate(target, PROMPT, max_new_tokens=40)
    drafter = ScriptedDrafter(target, PROMPT + plain.tokens)
    got = speculative_generate(target, drafter, PROMPT, max_new_tokens=40)
    assert got.tokens == plain.tokens
    assert sum(got.accepted) > 0
    assert min(got.accepted) < max(got.offered)  # some blocks were cut: rollback was exercised
    assert len(set(plain.tokens)) > 5  # not a constant text that any rollback error would reproduce


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding"])
def test_a_cache_that_keeps_rejected_tokens_changes_the_output(
    make_target_dir: TargetMaker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(make_target_dir, kind)
    plain = greedy_generate(target, PROMPT, max_new_tokens=40)
    monkeypatch.setattr(TargetSession, "keep", lambda self, n: None)
    drafter = ScriptedDrafter(target, PROMPT + plain.tokens, wrong=4)
    with pytest.raises(AssertionError):  # the drafter notices that positions ran ahead
        speculative_generate(target, drafter, PROMPT, max_new_tokens=40)


def test_greedy_output_equals_transformers_generate(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = target.model.generate(torch.tensor([PROMPT]), generation_config=config)[0, len(PROMPT) :].tolist()
    assert greedy_generate(target, PROMPT, max_new_tokens=24).tokens == expected


def test_drafter_sees_the_same_features_as_in_training(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    plain = greedy_generate(target, PROMPT, max_new_tokens=30)
    drafter = ScriptedDrafter(target, PROMPT + plain.tokens)
    speculative_generate(target, drafter, PROMPT, max_new_tokens=30)
    seen = torch.cat(drafter.seen)
    whole = target.features(torch.tensor(PROMPT + plain.tokens), drafter.target_layer_ids).hidden
    torch.testing.assert_close(seen, whole[: len(seen)], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(seen[1:], whole[: len(seen) - 1], atol=1e-2)


def test_a_perfect_drafter_needs_one_forward_a_block(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    plain = greedy_generate(target, PROMPT, max_new_tokens=41)
    drafter = ScriptedDrafter(target, PROMPT + plain.tokens, wrong=0)
    got = speculative_generate(target, drafter, PROMPT, max_new_tokens=41)
    assert plain.target_forwards == 41
    assert got.target_forwards == 1 + 40 // 5
    assert got.accepted == got.offered == [4] * 8


def test_recurrent_targets_pay_one_more_forward_for_a_cut_block(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir, "qwen3.5")
    plain = greedy_generate(target, PROMPT, max_new_tokens=30)
    got = speculative_generate(target, ScriptedDrafter(target, PROMPT + plain.tokens), PROMPT, max_new_tokens=30)
    cut = sum(a < o for a, o in zip(got.accepted, got.offered))
    assert got.target_forwards == 1 + len(got.accepted) + cut


def test_recurrent_state_left_as_it_was_is_noticed(
    make_target_dir: TargetMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(make_target_dir, "qwen3-next")
    check_rollback(target)
    target.rollback_checked = False
    monkeypatch.setattr("dflash.session._copy_layer", lambda layer: layer)  # aliases what the forward writes to
    with pytest.raises(TargetError, match="recurrent cache"):
        check_rollback(target)


def test_generation_stops_at_every_end_token_of_the_generation_config(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    free = greedy_generate(target, PROMPT, max_new_tokens=40).tokens
    for stop_at in (0, 7, 18):
        target.eos_token_ids = frozenset({free[stop_at], 383})
        plain = greedy_generate(target, PROMPT, max_new_tokens=40).tokens
        drafter = ScriptedDrafter(target, PROMPT + free, wrong=0)
        got = speculative_generate(target, drafter, PROMPT, max_new_tokens=40)
        assert plain == free[: free.index(free[stop_at]) + 1]
        assert got.tokens == plain
        assert sum(got.accepted) + len(got.accepted) + 1 in (len(plain), len(plain) + 1)


def test_several_end_tokens_are_read_from_the_generation_config(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    target.model.generation_config.eos_token_id = [2, 7]
    assert Target(target.model, target.tokenizer, target.path, "").eos_token_ids == {2, 7}


def test_a_text_may_end_exactly_at_the_targets_last_position(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    limit = target.config.max_position_embeddings
    prompt = (PROMPT * limit)[: limit - 6]
    plain = greedy_generate(target, prompt, max_new_tokens=7)  # the last token needs no forward
    drafter = ScriptedDrafter(target, prompt + plain.tokens, wrong=0)
    assert speculative_generate(target, drafter, prompt, max_new_tokens=7).tokens == plain.tokens
    with pytest.raises(DataError, match=f"{limit} positions"):
        greedy_generate(target, prompt, max_new_tokens=8)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [([], {"max_new_tokens": 4}, DataError), (PROMPT, {"max_new_tokens": 0}, ConfigError)],
)
def test_requests_that_make_no_sense_are_refused(
    make_target_dir: TargetMaker, prompt: list[int], options: dict[str, int], error: type[Exception]
) -> None:
    target = load(make_target_dir)
    with pytest.raises(error):
        greedy_generate(target, prompt, **options)
    with pytest.raises(ConfigError, match="temperature"):
        greedy_generate(target, PROMPT, max_new_tokens=2, temperature=-1.0)


def test_accept_greedy_equals_a_plain_loop_over_every_pattern() -> None:
    for pattern in range(16):
        own = [10, 11, 12, 13, 14]
        drafted = [own[i] if pattern >> i & 1 else 99 for i in range(4)]
        n = next((i for i in range(4) if not pattern >> i & 1), 4)
        assert accept_greedy(drafted, own) == (n, own[n])


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def emitted_pairs(rule: Any, draft_probs: Tensor, target_probs: Tensor, n_draws: int) -> Tensor:
    """Counts of (first, second) emitted token over many blocks of two drafted tokens; the second may come later."""
    generator = torch.Generator().manual_seed(11)
    vocab = draft_probs.shape[-1]
    counts = torch.zeros(vocab, vocab)
    for _ in range(n_draws):
        drafted = torch.multinomial(draft_probs, 1, generator=generator)[:, 0]
        n, bonus = rule(drafted, draft_probs, target_probs, generator)
        emitted = [*drafted[:n].tolist(), bonus]
        if len(emitted) == 1:  # the next step starts at slot 2 with the target's own distribution
            emitted.append(int(torch.multinomial(target_probs[1], 1, generator=generator)))
        counts[emitted[0], emitted[1]] += 1
    return counts


def no_residual(drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator) -> Any:
    """A plausible mistake: after a rejection, draw from the target instead of from what the drafter left over."""
    n, _ = accept_sampled(drafted, draft_probs, target_probs, generator)
    return n, int(torch.multinomial(target_probs[n], 1, generator=generator))


def test_sampled_tokens_follow_the_targets_distribution_and_a_wrong_rule_does_not() -> None:
    torch.manual_seed(3)
    draft_probs, target_probs = torch.softmax(torch.randn(2, 4), -1), torch.softmax(torch.randn(3, 4), -1)
    n_draws = 3000
    expected = target_probs[0][:, None] * target_probs[1][None] * n_draws
    right = emitted_pairs(accept_sampled, draft_probs, target_probs, n_draws)
    assert chi_square(right, expected) < CHI_SQUARE_999[15]
    wrong = emitted_pairs(no_residual, draft_probs, target_probs, n_draws)
    assert chi_square(wrong, expected) > 2 * CHI_SQUARE_999[15]


def accept_everything(drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator) -> Any:
    return len(drafted), int(torch.multinomial(target_probs[-1], 1, generator=generator))


class SamplingDrafter(ScriptedDrafter):
    """Follows its script with confidence, but takes the anchor as it comes."""

    def draft(self, cache: Any, new_hidden: Tensor, block_ids: Tensor, start: int) -> Tensor:
        self.script[start] = int(block_ids[0, 0])
        return 1.8 * super().draft(cache, new_hidden, block_ids, start)  # 0.9 on one token at temperature 2


def second_token_counts(target: Target, script: list[int], bin_of: Tensor, n_draws: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    counts = torch.zeros(8)
    for _ in range(n_draws):
        drafter = SamplingDrafter(target, list(script), block_size=3)
        options = {"max_new_tokens": 2, "temperature": 2.0, "generator": generator}
        counts[bin_of[speculative_generate(target, drafter, PROMPT, **options).tokens[1]]] += 1
    return counts


def exact_second_token(target: Target, temperature: float) -> Tensor:
    ids = torch.tensor([[*PROMPT, token] for token in range(target.vocab_size)])
    with torch.no_grad():
        probs = torch.softmax(target.model(ids).logits[:, -2:] / temperature, -1)
    return probs[0, 0] @ probs[:, 1]


def test_sampling_with_a_temperature_follows_the_target_end_to_end(
    make_target_dir: TargetMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(make_target_dir)
    script = PROMPT + greedy_generate(target, PROMPT, max_new_tokens=12).tokens
    exact = exact_second_token(target, 2.0)
    order = exact.argsort(descending=True)  # eight bins of about equal probability, likeliest tokens first
    bin_of = torch.empty_like(order)
    bin_of[order] = (exact[order].cumsum(0) * 8).long().clamp(max=7)
    expected = torch.zeros(8).index_add_(0, bin_of, exact)
    n_draws = 120
    assert chi_square(second_token_counts(target, script, bin_of, n_draws), expected * n_draws) < CHI_SQUARE_999[7]
    monkeypatch.setattr("dflash.decode.accept_sampled", accept_everything)
    wrong = second_token_counts(target, script, bin_of, n_draws)
    assert chi_square(wrong, expected * n_draws) > 2 * CHI_SQUARE_999[7]
