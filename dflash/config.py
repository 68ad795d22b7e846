"""The configuration of every verb: frozen dataclasses, one comment a field with its unit and source."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dflash.errors import ConfigError
from dflash.ranges import check_ranges

DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
StrategyName = Literal["auto", "eager", "sdpa", "locked-compile", "force-compile", "isolated"]


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
    # a conversation in which the assistant never speaks: stop, or leave out
    no_assistant: Literal["error", "drop"] = "error"
    # where the loss mask comes from: the chat template's generation blocks, or the prompt rendered before each answer
    mask_from: Literal["template", "prefix"] = "template"
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
    # micro-batches a step, over all drafters and processes; 0: one for each drafter
    accumulate: int = 0
    # steps in a row with a loss or gradient that is not finite, after which the run stops; each one is skipped
    max_nonfinite: int = 10
    # passes over the data when `steps` is not given
    epochs: int = 6

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step: `accumulate`, or one where nobody has said how many drafters there are."""
        return max(1, self.accumulate)


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
    # devices that run the target, a thread each: cuda:0-4, cuda:0,cuda:2 or cpu,cpu; empty: `device` has both roles
    targets: str = ""
    # devices that run a drafter, a thread each; given together with `targets`
    drafters: str = ""
    # micro-batches whose features wait for a drafter
    queue_depth: int = 4
    # deaths of target threads that are made good by a new thread
    restarts: int = 0
    # under torchrun: split the drafter's weights, gradients and optimizer over the processes (FSDP2), to make it fit
    shard: bool = False
    # seconds without any progress after which the run writes its stacks and stops with exit code 3; 0: never
    watchdog: float = 0.0
    # how compiled attention is made safe
    attn_strategy: StrategyName = "auto"
    # attention kernel; auto: flex on cuda, sdpa on cpu
    attn_kernel: Literal["auto", "flex", "sdpa"] = "auto"
    # what is compiled by the compiling strategies
    compile_scope: Literal["attention", "layer"] = "attention"
    # run also what is refused because threads disturb each other (uncompiled flex with gradients in several threads)
    force_unsafe: bool = False
    # compile for every width of row before the first step, not at the first step that needs it
    warm_up: bool = True
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
    # print nothing but errors
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    # besides metrics.jsonl: tensorboard, wandb (offline unless WANDB_MODE says otherwise); each is an extra
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    # the frozen model
    target: TargetOptions = field(default_factory=TargetOptions)
    # the drafter's shape
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    # what is trained on
    data: DataOptions = field(default_factory=DataOptions)
    # what the drafter is trained to do
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    # AdamW and its schedule
    optim: OptimOptions = field(default_factory=OptimOptions)
    # speculative decoding on held-out prompts
    eval: EvalOptions = field(default_factory=EvalOptions)


@dataclass(frozen=True)
class EvaluateConfig:
    """Everything `dflash evaluate` needs to know."""

    # a run directory (its best checkpoint), one of its checkpoints, or an export directory
    drafter: Path
    # directory of the target, or "embedded"; none: the one the run was trained for
    target: str | None = None
    # JSONL or Parquet file of conversations, or "embedded"; none: the held-out file of the run
    prompts: str | None = None
    # prompts used, from the first; 0: all
    limit: int = 0
    # tokens generated for a prompt
    max_new_tokens: int = 96
    # cpu, cuda, cuda:N, or auto
    device: str = "auto"
    # run Python code that comes with the model directory
    trust_remote_code: bool = False
    # print one JSON object instead of the table
    json: bool = False


@dataclass(frozen=True)
class GenerateConfig:
    """Everything `dflash generate` needs to know."""

    # a run directory (its best checkpoint), one of its checkpoints, or an export directory
    drafter: Path
    # what the user says
    prompt: str
    # directory of the target, or "embedded"; none: the one the run was trained for
    target: str | None = None
    # tokens generated
    max_new_tokens: int = 128
    # sampling temperature; 0: greedy
    temperature: float = 0.0
    # seed of the sampling
    seed: int = 0
    # cpu, cuda, cuda:N, or auto
    device: str = "auto"
    # run Python code that comes with the model directory
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ExportConfig:
    """Everything `dflash export` needs to know."""

    # a run directory (its best checkpoint), one of its checkpoints, or an export directory of either format
    drafter: Path
    # directory that is written; it must not exist
    output: Path
    # zlab: z-lab, SGLang and vLLM; speculators: the vLLM project's trainer
    format: Literal["zlab", "speculators"] = "zlab"
    # directory of the target, or "embedded"; none: the one the run was trained for
    target: str | None = None
    # run Python code that comes with the model directory
    trust_remote_code: bool = False


@dataclass(frozen=True)
class BenchStepConfig:
    """Everything `dflash bench step` needs to know."""

    # steps that are timed
    steps: int = 20
    # steps before the timing starts
    warmup: int = 3
    # print one JSON object instead of a line
    json: bool = False


PRESETS: dict[str, TrainConfig] = {
    # minutes on two CPU cores, with the target that is shipped
    "tiny": TrainConfig(
        steps=800,
        # from the target's own last layers: training tau 1.84 after 100 steps, 1.42 after 120 from random weights
        drafter=DrafterOptions(layers=3, block_size=8, max_anchors=64, init="target"),
        data=DataOptions(row_tokens=512),
        optim=OptimOptions(lr=2e-3),
    ),
    # arXiv 2602.06036, section 5: 5 layers, blocks of 16, 512 anchors, sequences of 3072, AdamW 6e-4, 6 epochs
    "paper": TrainConfig(dtype="bfloat16", target=TargetOptions(dtype="bfloat16"), save_every=1000),
    # the run this project grew out of: Qwen3.6-27B, blocks of 32, 64 anchors in 2000 tokens, soft labels
    "case": TrainConfig(
        dtype="bfloat16",
        save_every=1000,
        target=TargetOptions(dtype="bfloat16"),
        drafter=DrafterOptions(layers=5, block_size=32, max_anchors=64),
        data=DataOptions(row_tokens=2000),
        objective=ObjectiveOptions(name="kl", gamma=10.0),
    ),
}

# fields that may differ between a checkpoint and the run that resumes it: they do not change what is computed
FREE_ON_RESUME = frozenset(
    {"output", "resume", "overwrite", "device", "save_every", "keep", "eval", "attn_strategy", "attn_kernel"}
    | {"quiet", "loggers", "compile_scope", "checkpoint_layers", "warm_up", "force_unsafe"}
    | {"targets", "drafters", "shard", "queue_depth", "restarts", "watchdog"}
)


def validate(config: TrainConfig) -> TrainConfig:
    """Returns `config`; raises ConfigError naming the first option whose value makes no sense."""
    check_ranges(config)
    for name, got, ok, expected in _checks(config):
        if not ok:
            raise ConfigError(expected, str(got), "change the value", where=f"--{name}")
    return config


def _checks(config: TrainConfig) -> Iterator[tuple[str, object, bool, str]]:
    drafter, data, optim = config.drafter, config.data, config.optim
    fits = data.row_tokens > drafter.block_size
    yield "data.row-tokens", data.row_tokens, fits, f"more tokens than a block has ({drafter.block_size})"
    yield "optim.betas", optim.betas, all(0 <= beta < 1 for beta in optim.betas), "two numbers in [0, 1)"
    device_ok = DEVICE.fullmatch(config.device) is not None
    yield "device", config.device, device_ok, "cpu, cuda, cuda:N or auto"
    yield "resume", "--overwrite as well", not (config.resume and config.overwrite), "one of --resume and --overwrite"


def same_training(a: TrainConfig, b: TrainConfig) -> bool:
    """True when both configurations compute the same curve, step for step."""
    free = {name: getattr(a, name) for name in FREE_ON_RESUME}
    return replace(b, **free) == a
