"""What the strategies bench runs in a child: drafters of one size, each thread its own, forward and backward."""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import Qwen3Config

from dflash.attention.base import AttentionBackend, Scope, Strategy, step_key
from dflash.attention.select import STRATEGIES, mask_form
from dflash.attention.unguarded import Unguarded
from dflash.drafter.anchors import Anchors, draw_anchors
from dflash.drafter.blocks import PlainRows
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import CrossEntropy
from dflash.features import Features

Kernel = Literal["flex", "sdpa"]
VOCABULARY, MASK_TOKEN = 8192, 8191
UNCOMPILED = ("eager", "sdpa")


@dataclass(frozen=True)
class Size:
    """Shapes of one measurement."""

    # context tokens of the longest row
    tokens: int
    # anchors (blocks) a row and tokens a block
    blocks: int
    block_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    # different row lengths, each compiled on its own; the second is 128 tokens shorter, and so on
    shapes: int


@dataclass(frozen=True)
class Job:
    """What one child measures."""

    strategy: str
    kernel: Kernel
    # what is compiled: attention alone, or each layer as a whole
    scope: Scope
    threads: int
    device: str
    size: Size
    # timed steps a thread, after every shape ran once
    steps: int
    # seconds from the child's first line to the verdict "hung"
    limit_s: float


@dataclass(frozen=True)
class Row:
    """The inputs of one step: one row of one document."""

    rows: PlainRows
    features: Features
    anchors: Anchors


class Worker:
    """One thread's drafter and rows."""

    def __init__(self, drafter: DFlashDrafter, rows: list[Row], strategy: Strategy) -> None:
        self.drafter, self.rows, self.strategy = drafter, rows, strategy

    def step(self, shape: int) -> int:
        """Forward and backward over the row of one length, in the strategy's scope; returns its context tokens."""
        row = self.rows[shape]
        hidden = row.features.hidden
        self.drafter.zero_grad(set_to_none=True)
        with self.strategy.step_scope(step_key(hidden, extra=self.drafter.max_anchors)):
            with torch.autocast(hidden.device.type, torch.bfloat16, enabled=hidden.device.type == "cuda"):
                loss = self.drafter.terms(row.rows, row.features, row.anchors, CrossEntropy()).loss_sum
            loss.backward()  # type: ignore[no-untyped-call]
        _wait(hidden)
        return hidden.shape[1]


def make_workers(job: Job) -> list[Worker]:
    """One strategy, shared as in a trainer; a drafter and rows for every thread."""
    device, size = torch.device(job.device), job.size
    made = Unguarded() if job.strategy == Unguarded.name else STRATEGIES[job.strategy]()
    kernel: Kernel = "sdpa" if job.strategy == "sdpa" else job.kernel
    # `choose` refuses the combinations whose failure is measured here
    backend = AttentionBackend(made, kernel, mask_form(job.strategy, kernel, device), "measured", job.scope)
    first = _drafter(size)
    workers = []
    for _ in range(job.threads):
        drafter = copy.deepcopy(first).to(device)
        drafter.bind_target(*_target(size, device))
        drafter.use_attention(backend)
        workers.append(Worker(drafter, [_row(size, shape, device) for shape in range(size.shapes)], made))
    return workers


def _drafter(size: Size) -> DFlashDrafter:
    target = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=8,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return DFlashDrafter(create_drafter_config(target, size.layers), [1], size.block_size, size.blocks, MASK_TOKEN)


def _target(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.empty(2, VOCABULARY, size.width).normal_(0.0, 0.02, generator=generator).to(device)
    return drawn[0], drawn[1]


def _row(size: Size, shape: int, device: torch.device) -> Row:
    T = size.tokens - 128 * shape
    generator = torch.Generator().manual_seed(shape)
    loss_mask = torch.ones(1, T, dtype=torch.bool)
    document_ids = torch.zeros(1, T, dtype=torch.int64)
    anchors = draw_anchors(
        loss_mask, document_ids, [[0]], block_size=size.block_size, max_anchors=size.blocks, seed=shape, epoch=0
    )
    input_ids = torch.randint(0, MASK_TOKEN, (1, T), generator=generator)
    hidden = torch.randn(1, T, 1, size.width, generator=generator)
    rows = PlainRows(*(t.to(device) for t in (input_ids, loss_mask, torch.arange(T)[None], document_ids)))
    return Row(rows, Features(hidden.to(device), hidden[:, :, 0].to(device)), anchors.to(device))


def _wait(tensor: Tensor) -> None:
    """The step's time is its device's, not only that of the launches; the device is named, as threads share it."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
