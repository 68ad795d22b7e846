"""Objectives against slow oracles, and one divisor for the whole global batch."""

import math

import pytest
import torch
from torch import Tensor

from dflash.drafter.anchors import Anchors
from dflash.drafter.blocks import PlainRows
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import OBJECTIVES, DPace, Targets, default_gamma, slot_decay
from dflash.errors import ConfigError
from dflash.features import Features
from tests.drafter.parts import draw, make_drafter, make_features, make_rows

B, N, S, V = 2, 3, 4, 11


def case() -> tuple[Tensor, Targets]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(B, N, S, V, generator=g)
    labels = torch.randint(0, V, (B, N, S), generator=g)
    valid = torch.rand(B, N, S, generator=g) < 0.7
    teacher = torch.randn(B, N, S, V, generator=g)
    return logits, Targets(labels, valid, slot_decay(S + 1, 3.0, logits.device), teacher)


def probabilities(row: Tensor) -> list[float]:
    exps = [math.exp(float(x)) for x in row]
    return [e / sum(exps) for e in exps]


def oracle(name: str, logits: Tensor, targets: Targets) -> tuple[float, float]:
    assert targets.teacher is not None
    total, weights = 0.0, 0.0
    for b in range(B):
        for n in range(N):
            q = [probabilities(logits[b, n, k]) for k in range(S)]
            right = [q[k][int(targets.labels[b, n, k])] for k in range(S)]
            for k in range(S):
                if not targets.valid[b, n, k]:
                    continue
                w, loss = math.exp(-k / 3.0), -math.log(right[k])
                if name == "kl":
                    p = probabilities(targets.teacher[b, n, k])
                    loss = sum(a * math.log(a / c) for a, c in zip(p, q[k], strict=True))
                if name == "dpace":
                    w = 0.0
                    for m in range(k, S):
                        w += math.prod(0.5 * right[i] + 0.5 if targets.valid[b, n, i] else 0.0 for i in range(m + 1))
                total, weights = total + w * loss, weights + w
    return total, weights


@pytest.mark.parametrize("name", OBJECTIVES)
def test_sums_equal_a_slow_oracle(name: str) -> None:
    logits, targets = case()
    total, weights = OBJECTIVES[name]()(logits, targets)
    expected = oracle(name, logits, targets)
    assert (float(total), float(weights)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slots_that_are_not_valid_get_no_gradient(name: str) -> None:
    logits, targets = case()
    logits.requires_grad_()
    OBJECTIVES[name]()(logits, targets)[0].backward()
    assert logits.grad is not None
    assert not logits.grad[~targets.valid].any()
    assert logits.grad.any()


def test_dpace_weights_are_detached_so_the_gradient_is_that_of_weighted_cross_entropy() -> None:
    logits, targets = case()
    logits.requires_grad_()
    (got,) = torch.autograd.grad(DPace()(logits, targets)[0], logits)
    nll = -logits.log_softmax(-1).gather(-1, targets.labels[..., None])[..., 0]
    weights = DPace().weights(nll.detach(), targets.valid)
    (expected,) = torch.autograd.grad((weights * nll).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_kl_is_zero_and_flat_when_drafter_and_target_agree() -> None:
    logits, targets = case()
    assert targets.teacher is not None
    same = targets.teacher.clone().requires_grad_()
    total, _ = OBJECTIVES["kl"]()(same, targets)
    (gradient,) = torch.autograd.grad(total, same)
    assert float(total.detach()) == pytest.approx(0.0, abs=1e-5)
    assert gradient.abs().max() < 1e-6
    assert float(OBJECTIVES["kl"]()(logits, targets)[0]) > 1.0


def test_gamma_defaults_are_the_papers() -> None:
    assert [default_gamma(k) for k in (8, 10, 16)] == [4.0, 5.0, 7.0]
    decay = slot_decay(8, None, torch.device("cpu"))
    assert decay.tolist() == pytest.approx([math.exp(-(k - 1) / 4.0) for k in range(1, 8)])


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan])
def test_a_gamma_that_is_not_positive_is_refused(gamma: float) -> None:
    with pytest.raises(ConfigError, match="gamma"):
        slot_decay(8, gamma, torch.device("cpu"))


def row(rows: PlainRows, index: int) -> PlainRows:
    pick = slice(index, index + 1)
    return PlainRows(rows.input_ids[pick], rows.loss_mask[pick], rows.position_ids[pick], rows.document_ids[pick])


def gradients(drafter: DFlashDrafter, divisor: Tensor) -> dict[str, Tensor]:
    return {n: p.grad / divisor for n, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_batch_of_n_n_batches_of_one_and_n_accumulated_give_one_loss_and_gradient(name: str) -> None:
    # rows with very different numbers of supervised tokens: a mean of means would differ
    rows = make_rows([[36], [6], [17]], tokens=36, supervised=0.8)
    features, objective = make_features(rows), OBJECTIVES[name]()
    drafter = make_drafter()
    anchors = draw(rows, drafter)
    whole = drafter.terms(rows, features, anchors, objective)
    (whole.loss_sum / whole.weight_sum).backward()
    expected = gradients(drafter, torch.ones(()))
    drafter.zero_grad()
    parts = []
    for i in range(3):
        pick = slice(i, i + 1)
        part = drafter.terms(
            row(rows, i),
            Features(features.hidden[pick], features.last[pick]),
            Anchors(anchors.position[pick], anchors.valid[pick]),
            objective,
        )
        part.loss_sum.backward()  # accumulates: the divisor is known only at the end
        parts.append(part)
    merged = parts[0].metrics + parts[1].metrics + parts[2].metrics
    assert float(merged.loss) == pytest.approx(float(whole.metrics.loss), rel=1e-5)
    mean_of_means = sum(float(p.metrics.loss) for p in parts) / 3
    assert abs(mean_of_means - float(merged.loss)) > 1e-3  # the wrong divisor would be noticed
    for key, gradient in gradients(drafter, merged.weight_sum.float()).items():
        torch.testing.assert_close(gradient, expected[key], atol=1e-5, rtol=1e-4)
