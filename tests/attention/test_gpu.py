"""Flex on a GPU: compiled and trained, equal to dense SDPA, for both scopes and under bfloat16."""

import pytest
import torch
from torch import Tensor

from dflash.attention.base import Scope, step_key
from dflash.attention.select import choose
from dflash.drafter.anchors import Anchors
from dflash.drafter.blocks import PlainRows
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import CrossEntropy
from dflash.features import Features
from tests.drafter.parts import LAYER_IDS, MASK, VOCABULARY, draw, make_features, make_rows, target_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def drafter_on_gpu(strategy: str, window: int | None, scope: Scope = "attention") -> DFlashDrafter:
    target = target_config()
    target.head_dim = 32  # flex on a GPU needs heads of at least 16
    config = create_drafter_config(target, 2, window)
    config.initializer_range = 0.1
    drafter = DFlashDrafter(config, LAYER_IDS, 8, 64, MASK)
    drafter.bind_target(torch.randn(VOCABULARY, config.hidden_size, generator=torch.Generator().manual_seed(0)))
    drafter.to("cuda")
    drafter.use_attention(choose(strategy, "auto", "cuda", scope=scope))
    return drafter


def step(drafter: DFlashDrafter, seed: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    rows = make_rows([[300 - seed, 150], [400]], 512, seed=seed)
    features, anchors = make_features(rows), draw(rows, drafter)
    moved = PlainRows(*(getattr(rows, n).cuda() for n in ("input_ids", "loss_mask", "position_ids", "document_ids")))
    on_gpu = Features(features.hidden.cuda(), features.last.cuda())
    anchors = Anchors(anchors.position.cuda(), anchors.valid.cuda())
    assert drafter.backend is not None
    strategy = drafter.backend.strategy
    drafter.zero_grad()
    with strategy.thread_scope(), strategy.step_scope(step_key(on_gpu.hidden, extra=dtype)):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            out = drafter.terms(moved, on_gpu, anchors, CrossEntropy())
        out.loss_sum.backward()
    loss = out.loss_sum / out.weight_sum
    return loss.detach(), {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("scope", ["attention", "layer"])
@pytest.mark.parametrize("strategy", ["locked-compile", "force-compile", "eager"])
def test_flex_trains_as_dense_sdpa_in_every_step(strategy: str, scope: Scope, window: int | None) -> None:
    reference, drafter = drafter_on_gpu("sdpa", window), drafter_on_gpu(strategy, window, scope)
    assert drafter.backend is not None
    assert drafter.backend.kernel == "flex"
    for seed in range(2):
        expected, got = step(reference, seed, torch.float32), step(drafter, seed, torch.float32)
        torch.testing.assert_close(got[0], expected[0], atol=2e-3, rtol=2e-3)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(got[1][name] / gradient.norm(), gradient / gradient.norm(), atol=5e-3, rtol=0)


def test_flex_trains_under_bfloat16_and_never_recompiles_for_a_shape_it_has_seen() -> None:
    reference, drafter = drafter_on_gpu("sdpa", None), drafter_on_gpu("locked-compile", None)
    step(drafter, 0, torch.bfloat16)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in (1, 2):
            got = step(drafter, seed, torch.bfloat16)[0]
            torch.testing.assert_close(got, step(reference, seed, torch.float32)[0], atol=0.05, rtol=0.02)
