"""Agreement tells answers of the target from answers of others."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dflash.agreement import target_agreement
from dflash.decode import greedy_generate
from dflash.errors import DataError
from tests.conftest import TargetMaker
from tests.test_decode import PROMPT, load


@dataclass(frozen=True)
class Answer:
    input_ids: np.ndarray
    loss_mask: np.ndarray


def answer(prompt: list[int], tokens: list[int]) -> Answer:
    mask = np.array([False] * len(prompt) + [True] * len(tokens))
    return Answer(np.array([*prompt, *tokens], dtype=np.int32), mask)


def test_the_targets_own_answers_agree_fully_and_those_of_others_hardly(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    own = [answer(p, greedy_generate(target, p, max_new_tokens=30).tokens) for p in (PROMPT, PROMPT[::-1])]
    generator = torch.Generator().manual_seed(0)
    others = [answer(PROMPT, torch.randint(4, 384, (30,), generator=generator).tolist()) for _ in range(2)]
    assert target_agreement(target, own) == 1.0
    assert target_agreement(target, others) < 0.1
    assert target_agreement(target, [*own, *others], limit=2) == 1.0
    assert 0.4 < target_agreement(target, [*own, *others]) < 0.6


def test_prompt_tokens_are_not_counted(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    tokens = greedy_generate(target, PROMPT, max_new_tokens=10).tokens
    everything = answer(PROMPT, tokens)
    everything = Answer(everything.input_ids, np.ones_like(everything.loss_mask))
    assert target_agreement(target, [everything]) < 1.0
    assert target_agreement(target, [answer(PROMPT, tokens)]) == 1.0


def test_documents_without_supervised_tokens_are_refused(make_target_dir: TargetMaker) -> None:
    with pytest.raises(DataError, match="loss mask"):
        target_agreement(load(make_target_dir), [answer(PROMPT, [])])
