"""Estimates: arithmetic against tensors that autograd really keeps, files that are really written, and a real run."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.config import DrafterOptions, ObjectiveOptions
from dflash.data.rows import batches
from dflash.doctor.base import Subject
from dflash.doctor.estimate import (
    FLOAT,
    Duration,
    Memory,
    Plan,
    Rates,
    Shape,
    activation_bytes,
    checkpoint_bytes,
    disk_bytes,
    duration,
    feature_bytes,
    head_bytes,
    memory,
)  # fmt: skip
from dflash.doctor.measure import plan_of, shape_of
from dflash.features import FeatureSource
from dflash.step import Stepper
from dflash.train import train
from tests.doctor.measured_estimates import CONFIGURATIONS, compare
from tests.training import quiet_log, small_config

CLOSE = 0.15


def kept_bytes(subject: Subject) -> int:
    """Bytes of distinct storages that a real forward keeps for its backward; weights and logits not counted."""
    config, parts = subject.config, subject.parts
    batch = next(islice(batches(parts.store, config.data, config.seed), 1))
    source = FeatureSource(parts.target, None, "online", list(parts.drafter.target_layer_ids))
    stepper = Stepper(config, parts, source, 10)
    ours = {p.untyped_storage().data_ptr() for p in parts.drafter.parameters()}
    ours |= {parts.target.head.untyped_storage().data_ptr(), parts.target.embedding.untyped_storage().data_ptr()}
    features, anchors = source.rows(batch), stepper.anchors(batch)
    ours |= {features.hidden.untyped_storage().data_ptr()}
    # held until the end: a storage that was freed would lend its address to the next one
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours and tensor.shape[-1:] != (parts.target.vocab_size,):
            seen[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stepper.forward_backward(batch, features, anchors)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {},
    "long rows": {"data": {"row_tokens": 384, "batch_rows": 2}, "drafter": {"layers": 2, "max_anchors": 24}},
    "many blocks": {"drafter": {"layers": 3, "block_size": 8, "max_anchors": 48}},
    "bfloat16": {"dtype": "bfloat16", "drafter": {"layers": 3, "block_size": 8, "max_anchors": 48}},
    "four features": {"drafter": {"layers": 2, "features": 4, "max_anchors": 16}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_what_autograd_keeps(name: str, tmp_path: Path, tiny_target_dir: Path) -> None:
    changes = dict(SHAPES[name])
    config = small_config(tmp_path, tiny_target_dir)
    config = replace(
        config,
        drafter=replace(config.drafter, **changes.get("drafter", {})),
        data=replace(config.data, **changes.get("data", {})),
        dtype=changes.get("dtype", "float32"),
    )
    subject = Subject(config)
    estimated, kept = activation_bytes(shape_of(subject)), kept_bytes(subject)
    assert estimated == pytest.approx(kept, rel=CLOSE)


def test_activations_of_another_shape_are_not_those_of_this_one(tmp_path: Path, tiny_target_dir: Path) -> None:
    subject = Subject(small_config(tmp_path, tiny_target_dir))
    wrong = replace(shape_of(subject), blocks=16)
    assert activation_bytes(wrong) != pytest.approx(kept_bytes(subject), rel=CLOSE)


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_recomputing_layers_keeps_less_and_kl_needs_more_logits(
    objective: Any, tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = small_config(tmp_path, tiny_target_dir, objective=ObjectiveOptions(name=objective))
    config = replace(config, drafter=DrafterOptions(layers=4, block_size=8, max_anchors=48))
    shape = shape_of(Subject(config))
    count = 48 * 7 * shape.vocabulary * FLOAT
    assert head_bytes(shape) == count * (3 if objective == "ce" else 7)
    assert activation_bytes(replace(shape, checkpointed=True)) < 0.6 * activation_bytes(shape)


def test_disk_is_what_a_real_run_leaves(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = small_config(tmp_path, tiny_target_dir, drafter=DrafterOptions(layers=4, block_size=4, max_anchors=8))
    config = replace(config, data=replace(config.data, features="cache"), save_every=12, steps=24)
    subject = Subject(config)
    shape, plan = shape_of(subject), plan_of(subject)
    stored = feature_bytes(subject.store.meta.tokens, shape.features, shape.width, shape.target_value)
    assert train(config, quiet_log()) == 0
    written = sum(path.stat().st_size for path in config.output.rglob("*") if path.is_file())
    assert disk_bytes(plan, shape.parameters, stored) == pytest.approx(written, rel=CLOSE)
    assert disk_bytes(replace(plan, save_every=1), shape.parameters, stored) > (1 + CLOSE) * written


def test_checkpoints_kept_are_counted_once_for_the_best() -> None:
    plan = Plan(steps=100, save_every=10, keep=2, evaluate_every=50, prompts=1, final_prompts=1)
    per = checkpoint_bytes(1_000_000)
    assert disk_bytes(plan, 1_000_000, 0) == pytest.approx(3 * per + FLOAT * 1_000_000, rel=0.01)
    assert disk_bytes(replace(plan, save_every=0), 1_000_000, 0) == pytest.approx(per + FLOAT * 1_000_000, rel=0.02)


def test_time_adds_steps_evaluations_and_the_closing_one() -> None:
    plan = Plan(steps=101, save_every=0, keep=1, evaluate_every=50, prompts=4, final_prompts=10)
    rates = Rates(step_s=2.0, prompt_s=1.0, plain_prompt_s=3.0)
    # evaluations at steps 50, 100 and 101
    assert duration(plan, rates) == Duration(202.0, 3 * 4 * 1.0 + 10 * 4.0)
    assert duration(replace(plan, evaluate_every=0), rates).evaluations_s == 4.0 + 40.0


def test_the_peak_is_the_largest_phase_not_the_sum_of_all() -> None:
    shape = Shape(
        rows=1, tokens=64, blocks=4, block_size=4, width=8, mlp=16, vocabulary=32, layers=1, heads=2, kv_heads=1,
        head_dim=4, features=2, parameters=10_000_000, target_bytes=1000, target_value=4, value=4, objective="ce",
        mask="dense", fused_norm=False,
    )  # fmt: skip
    needed = memory(shape, process=5000, on_cpu=True)
    # so many parameters and so few tokens: reading the checkpoint at the end is the largest moment
    assert needed.peak == needed.fixed + needed.gradients + needed.closing
    assert memory(shape, process=5000, on_cpu=False).peak == needed.fixed + needed.features + needed.gradients
    many = memory(replace(shape, blocks=4096, parameters=1000), process=5000, on_cpu=True)
    assert many.peak == many.fixed + many.features + many.activations + many.head + many.allocator
    assert set(needed.by_part()) == {f for f in Memory.__dataclass_fields__ if f != "accumulating"} | {"peak"}


def test_memory_of_a_real_run_is_within_15_percent(tmp_path: Path) -> None:
    found = compare(CONFIGURATIONS["tiny"], tmp_path / "run")
    assert abs(found.memory_error) < CLOSE
    assert found.estimated_disk == pytest.approx(found.measured_disk, rel=CLOSE)
