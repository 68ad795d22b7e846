"""One optimizer step: features -> anchors -> forward and backward in the strategy's scope -> clip -> AdamW."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.attention.base import step_key
from dflash.config import TrainConfig
from dflash.data.rows import Batch
from dflash.drafter.anchors import Anchors, draw_anchors
from dflash.drafter.blocks import PlainRows
from dflash.drafter.metrics import Metrics
from dflash.features import Features, FeatureSource
from dflash.optim import finish_gradients, learning_rate, set_learning_rate
from dflash.parts import Parts
from dflash.pipeline.counts import Counted, Merge, alone
from dflash.pipeline.memory import memory_errors


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; `metrics` is none when no micro-batch had a valid anchor."""

    metrics: Metrics | None
    # context tokens, padding not counted
    tokens: int
    # micro-batches without a valid anchor
    empty: int
    # gradient norm before clipping
    grad_norm: float
    learning_rate: float
    # false: the loss or the gradient was not finite, or there was nothing to train on; the weights are as before
    applied: bool
    seconds: float


class Stepper:
    """Runs optimizer steps; the same code trains and is measured by `dflash bench step`."""

    def __init__(
        self, config: TrainConfig, parts: Parts, source: FeatureSource, total_steps: int, merge: Merge = alone
    ) -> None:
        """`source`: where the target's features come from; `merge`: sums over the processes that share a step."""
        self.config, self.parts, self.source, self.total_steps = config, parts, source, total_steps
        self._merge = merge

    def step(self, number: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Optimizer step `number` (from 0) over the micro-batches; one division by the whole step's sum(w)."""
        began_s = time.perf_counter()
        self.parts.optimizer.zero_grad(set_to_none=True)
        counted = Counted()
        for batch in micro_batches:
            counted += self.count(batch)
        return self.update(number, counted, began_s)

    def count(self, batch: Batch) -> Counted:
        """Anchors, features, forward and backward of one micro-batch, in the calling thread."""
        anchors = self.anchors(batch)
        features = None
        if anchors.valid.any():
            with memory_errors("target", self.parts.target.device, identity(batch)):
                features = self.source.rows(batch)
        return self.count_features(batch, features, anchors, context_tokens(batch))

    def count_features(self, batch: Batch, features: Features | None, anchors: Anchors, tokens: int) -> Counted:
        """Forward and backward of a micro-batch whose features are there; none: it has no valid anchor."""
        if features is None:
            if self.config.shard:
                # the others wait in the middle of their forward pass: no block is valid, so all gradients are zero
                self.forward_backward(batch, self._no_features(batch), anchors)
            return Counted(None, tokens, empty=1)
        with memory_errors("drafter", self.parts.device, identity(batch)):
            return Counted(self.forward_backward(batch, features, anchors), tokens)

    def update(self, number: int, counted: Counted, began_s: float) -> StepResult:
        """Clips and applies the gradients that lie in the parameters, unless something is not finite."""
        parts = self.parts
        counted = self._merge(counted, list(parts.parameters.values()), parts.drafter.block_size - 1)
        metrics, rate = counted.metrics, learning_rate(number, self.total_steps, self.config.optim)
        grad_norm = 0.0 if metrics is None else self._finish(metrics)
        applied = metrics is not None and math.isfinite(grad_norm) and math.isfinite(float(metrics.loss))
        if applied:
            set_learning_rate(parts.optimizer, rate)
            parts.optimizer.step()
        seconds = time.perf_counter() - began_s
        return StepResult(metrics, counted.tokens, counted.empty, grad_norm, rate, applied, seconds)

    def anchors(self, batch: Batch) -> Anchors:
        """Where this batch's blocks start: a function of the seed, the epoch and each document, nothing else."""
        drafter = self.parts.drafter
        return draw_anchors(
            batch.loss_mask,
            batch.document_ids,
            batch.doc_ids,
            block_size=drafter.block_size,
            max_anchors=drafter.max_anchors,
            seed=self.config.seed,
            epoch=batch.epoch,
        )

    def forward_backward(self, batch: Batch, features: Features, anchors: Anchors) -> Metrics:
        """Adds the gradient of this micro-batch's sum(w * l); the strategy's scope covers forward and backward."""
        parts, device = self.parts, self.parts.device
        rows = PlainRows(
            batch.input_ids.to(device),
            batch.loss_mask.to(device),
            batch.position_ids.to(device),
            batch.document_ids.to(device),
        )
        # in a pipeline they are there already; a warm-up may bring them from the target's device
        features = Features(features.hidden.to(device), features.last.to(device))
        with parts.attention.strategy.step_scope(step_key(rows.input_ids, features.hidden, extra=parts.dtype)):
            with parts.arithmetic():
                terms = parts.drafter.terms(
                    rows, features, anchors.to(device), parts.objective, self.config.objective.gamma
                )
            terms.loss_sum.backward()  # type: ignore[no-untyped-call]
        return terms.metrics

    def _no_features(self, batch: Batch) -> Features:
        shape, target = batch.input_ids.shape, self.parts.target
        options = {"dtype": target.dtype, "device": self.parts.device}
        last = torch.zeros(*shape, target.hidden_size, **options)  # type: ignore[call-overload]
        layers = len(self.parts.drafter.target_layer_ids)
        return Features(last[:, :, None].expand(-1, -1, layers, -1), last)

    def _finish(self, metrics: Metrics) -> float:
        return finish_gradients(self.parts.parameters.values(), float(metrics.weight_sum), self.config.optim.clip)


def context_tokens(batch: Batch) -> int:
    """Tokens of a batch, padding not counted."""
    return int((batch.document_ids >= 0).sum())


def identity(batch: Batch) -> str:
    """Which batch it is, for errors: its position in the data and its documents."""
    documents = [store_id for row in batch.doc_ids for store_id in row]
    some = ", ".join(map(str, documents[:8])) + (", ..." if len(documents) > 8 else "")
    return f"batch {batch.epoch}/{batch.index}, documents {some or 'none'}"
