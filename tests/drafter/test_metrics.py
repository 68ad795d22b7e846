"""Metrics against a slow oracle, and what they are not."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash.drafter.metrics import Metrics, count

ZERO = torch.zeros(())


def counted(right: Tensor, valid: Tensor) -> Metrics:
    labels = torch.zeros_like(right, dtype=torch.int64)
    return count(torch.where(right, 0, 1), labels, valid, ZERO, ZERO)


@given(st.integers(0, 10_000), st.floats(0.2, 0.95))
@settings(max_examples=50, deadline=None)
def test_counts_equal_a_slow_oracle(seed: int, share: float) -> None:
    g = torch.Generator().manual_seed(seed)
    right = torch.rand(2, 5, 4, generator=g) < share
    valid = torch.rand(2, 5, 4, generator=g) < 0.8
    m = counted(right, valid)
    reached, accepted, prefix, blocks = [0] * 4, [0] * 4, [], 0
    for b in range(2):
        for n in range(5):
            length = 0
            for k in range(4):
                if not valid[b, n, k]:
                    break
                reached[k] += 1
                if not right[b, n, k]:
                    break
                accepted[k] += 1
                length += 1
            prefix.append(length)
            blocks += int(valid[b, n, 0])
    assert m.reached.tolist() == reached
    assert m.accepted.tolist() == accepted
    assert float(m.tau) == pytest.approx(sum(prefix) / blocks + 1 if blocks else 1.0)
    assert m.correct.tolist() == (right & valid).sum((0, 1)).tolist()
    assert float(m.accuracy) == pytest.approx(float((right & valid).sum() / valid.sum()))


def test_tau_is_the_mean_prefix_plus_the_bonus_token_not_a_product_of_marginals() -> None:
    correlated = torch.tensor([[[True, True], [False, False]]])
    c = counted(correlated, torch.ones_like(correlated))
    assert float(c.tau) == 2.0
    assert 1 + float(c.slot_accuracy.cumprod(0).sum()) == 1.75  # what the product of marginals would say
    assert c.conditional_acceptance.tolist() == [0.5, 1.0]


def test_adding_the_metrics_of_two_batches_equals_counting_them_together() -> None:
    g = torch.Generator().manual_seed(1)
    right, valid = torch.rand(4, 6, 3, generator=g) < 0.7, torch.rand(4, 6, 3, generator=g) < 0.8
    together = counted(right, valid)
    merged = counted(right[:1], valid[:1]) + counted(right[1:], valid[1:])
    for f in fields(Metrics):
        assert torch.equal(getattr(together, f.name), getattr(merged, f.name))
    assert not torch.equal(merged.matched, counted(right[:1], valid[:1]).matched)


def test_nothing_supervised_gives_zero_rates_and_tau_one() -> None:
    nothing = torch.zeros(1, 2, 3, dtype=torch.bool)
    m = counted(nothing, nothing)
    assert [float(m.loss), float(m.accuracy), float(m.tau)] == [0.0, 0.0, 1.0]
    assert m.conditional_acceptance.tolist() == [0.0, 0.0, 0.0]
