"""The configuration of a run: frozen dataclasses, one comment a field with its unit and source."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

StrategyName = Literal["auto", "eager", "sdpa", "locked-compile", "force-compile"]


@dataclass(frozen=True)
class TargetOptions:
    """The frozen model whose output the drafter learns to predict."""

    # directory of a Hugging Face causal LM, or "embedded" for the one shipped with the package
    path: str = "embedded"
    # dtype the target computes in
    dtype: Literal["float32", "bfloat16"] = "float32"
    # run Python code that comes with the model directory; never turned on by dflash itself
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DrafterOptions:
    """The drafter's shape (arXiv 2602.06036, section 4)."""

    # decoder layers of the drafter
    layers: int = 5
    # tokens a block: slot 0 is known, slots 1..block_size-1 are speculated
    block_size: int = 16
    # blocks drawn per packed row (fixed: missing ones are padded)
    max_anchors: int = 512
    # target layers whose outputs are read; none: spread evenly over the target, one for each drafter layer
    layer_ids: tuple[int, ...] | None = None
    # number of target layers read when layer_ids is none; none: as many as drafter layers
    features: int | None = None
    # token that stands in unknown slots; none: the tokenizer's own mask token
    mask_token_id: int | None = None
    # context window in tokens of sliding layers; none: every layer sees the whole context
    sliding_window: int | None = None
    # inside a block, sliding layers attend causally (as servers run them); false: both ways
    sliding_causal_block: bool = True
    # initial weights: drawn at random, or copied from the target's last layers where shapes match
    init: Literal["random", "target"] = "random"


@dataclass(frozen=True)
class DataOptions:
    """What is trained on, and how conversations become fixed-shape rows."""

    # JSONL or Parquet file(s) of conversations, a `dflash prepare` store, or "embedded"
    train: str = "embedded"
    # the same, never trained on: the acceptance length that picks the best checkpoint is measured here
    heldout: str = "embedded"
    # tokens a row; also the longest conversation
    row_tokens: int = 3072
    # rows a micro-batch
    batch_rows: int = 1
    # put several short conversations in a row
    pack: bool = True
    # a conversation longer than row_tokens: cut, leave out, or stop
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    # target features: computed each step, computed once and kept, or read from a store
    features: Literal["online", "cache", "offline"] = "online"
    # directory of the feature store; none: <output>/features
    feature_store: Path | None = None


@dataclass(frozen=True)
class ObjectiveOptions:
    """What the drafter is trained to do."""

    # ce: the data's token (paper); kl: the target's distribution; dpace: weights from confidence (arXiv 2605.18810)
    name: Literal["ce", "kl", "dpace"] = "ce"
    # decay of the slot weights exp(-(k-1)/gamma), in slots; none: 7, 5, 4 for blocks of 16, 10, 8
    gamma: float | None = None


@dataclass(frozen=True)
class OptimOptions:
    """AdamW with a cosine schedule; defaults are the paper's."""

    # peak learning rate
    lr: float = 6e-4
    # AdamW betas
    betas: tuple[float, float] = (0.9, 0.95)
    # AdamW decoupled weight decay
    weight_decay: float = 0.0
    # share of the steps spent warming up, 0..1
    warmup: float = 0.04
    # largest gradient norm
    clip: float = 1.0
    # micro-batches a step
    accumulate: int = 1
    # passes over the data when `steps` is not given
    epochs: int = 6


@dataclass(frozen=True)
class EvalOptions:
    """Speculative decoding on held-out prompts: the metric that picks the best checkpoint."""

    # steps between evaluations; 0: only at the end
    every: int = 200
    # prompts of an evaluation during training; the last one uses every held-out prompt
    prompts: int = 16
    # tokens generated for a prompt
    max_new_tokens: int = 96


@dataclass(frozen=True)
class TrainConfig:
    """Everything `dflash train` needs to know."""

    # run directory: the only place a run writes to
    output: Path = Path("runs/default")
    # optimizer steps; none: optim.epochs passes over the data
    steps: int | None = None
    # seed of weights, data order and anchors
    seed: int = 0
    # cpu, cuda, cuda:N, or auto (cuda when there is one)
    device: str = "auto"
    # how compiled attention is made safe
    attn_strategy: StrategyName = "auto"
    # attention kernel; auto: flex on cuda, sdpa on cpu
    attn_kernel: Literal["auto", "flex", "sdpa"] = "auto"
    # what is compiled by the compiling strategies
    compile_scope: Literal["attention", "layer"] = "attention"
    # dtype of the drafter's arithmetic; master weights are always float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    # recompute drafter layers in the backward pass to save memory
    checkpoint_layers: bool = False
    # steps between checkpoints; 0: only at the end
    save_every: int = 200
    # checkpoints kept besides the best one
    keep: int = 2
    # continue the run in `output`
    resume: bool = False
    # delete what is in `output` first
    overwrite: bool = False
    target: TargetOptions = field(default_factory=TargetOptions)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    data: DataOptions = field(default_factory=DataOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
