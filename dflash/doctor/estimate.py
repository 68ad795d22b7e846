"""How much memory, disk and time a run will take: arithmetic on shapes, checked against real runs by the tests.

Memory counts the tensors that one step keeps for its backward pass (read off drafter/layers.py) and the largest
moment of each phase; letters as elsewhere: B rows, T tokens, N blocks, K block size, H width, V vocabulary.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

FLOAT = 4
# logits-sized float32 tensors alive at once: for ce the log-softmax and the gradients of both steps of its backward;
# for kl logits, the teacher's, both log-softmaxes, the probabilities, the difference and the product
LOGITS_ALIVE = {"ce": 3, "dpace": 3, "kl": 7}
# a CPU's malloc keeps freed blocks that the next step does not fit into: of all that a step allocates, what recomputed
# layers free at once included, 12 to 40 % in the five runs of tests/doctor/measured_estimates.py; one share fits all
ALLOCATOR_SHARE = 0.33
TILE_QUERIES = 64
# bytes of one line of metrics.jsonl, and of an evaluation
STEP_LINE, EVALUATION_LINE = 420, 600


@dataclass(frozen=True)
class Shape:
    """All sizes that memory and disk depend on."""

    # B, T, N, K
    rows: int
    tokens: int
    blocks: int
    block_size: int
    # H, the MLP's width, V
    width: int
    mlp: int
    vocabulary: int
    # drafter layers, heads, key-value heads, size of a head, target layers read
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    features: int
    # trainable parameters
    parameters: int
    # bytes of the target's weights, and of one of its values
    target_bytes: int
    target_value: int
    # bytes of one value of the drafter's arithmetic
    value: int
    objective: Literal["ce", "kl", "dpace"]
    mask: Literal["blocks", "dense", "tiles"]
    # cuda keeps only a norm's input, the cpu a float32 copy and the normed one
    fused_norm: bool
    accumulate: int = 1
    # recompute layers in the backward pass
    checkpointed: bool = False
    # mean tokens of a document: what a tile of queries can see at most
    document: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes by part; `peak` is that of the largest phase."""

    # the process before anything is loaded
    process: int
    target: int
    # float32 masters, Adam's two moments
    drafter: int
    moments: int
    gradients: int
    # the target's layer outputs of one micro-batch
    features: int
    # what the drafter keeps for its backward pass
    activations: int
    # head and loss: logits and what is made of them
    head: int
    # the best checkpoint, read at the end of the run
    closing: int
    # freed and kept by the allocator
    allocator: int = 0
    # gradients are there while the next micro-batch runs
    accumulating: bool = False

    @property
    def fixed(self) -> int:
        """There all the time."""
        return self.process + self.target + self.drafter + self.moments

    @property
    def step_peak(self) -> int:
        """The larger of: all activations and the logits; all gradients, when activations are gone."""
        forward = self.features + self.activations + self.head + self.allocator
        forward += self.gradients if self.accumulating else 0
        return self.fixed + max(forward, self.features + self.gradients)

    @property
    def peak(self) -> int:
        """The largest moment of the run."""
        return max(self.step_peak, self.fixed + self.gradients + self.closing)

    def by_part(self) -> dict[str, int]:
        """Name and bytes of every part, the peak last."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "accumulating"}
        return {**parts, "peak": self.peak}


@dataclass(frozen=True)
class Plan:
    """What a run will do. Steps between saves and evaluations: 0 means only at the end."""

    steps: int
    save_every: int
    keep: int
    evaluate_every: int
    # prompts of an evaluation during training, and of the closing one
    prompts: int
    final_prompts: int


@dataclass(frozen=True)
class Rates:
    """Seconds, measured on the machine: a step, a prompt decoded speculatively, one decoded plainly."""

    step_s: float
    prompt_s: float
    plain_prompt_s: float


@dataclass(frozen=True)
class Duration:
    """Seconds. Evaluations are at most that: they get faster as the drafter gets better."""

    steps_s: float
    evaluations_s: float

    @property
    def total_s(self) -> float:
        """Both."""
        return self.steps_s + self.evaluations_s


def memory(shape: Shape, process: int, *, on_cpu: bool) -> Memory:
    """Bytes by part; on_cpu: malloc's waste, and the checkpoint read at the end, are in the same memory."""
    weights = FLOAT * shape.parameters
    allocated = activation_bytes(replace(shape, checkpointed=False)) + head_bytes(shape)
    return Memory(
        process=process,
        target=shape.target_bytes,
        drafter=weights,
        moments=2 * weights,
        gradients=weights,
        features=feature_bytes(shape.rows * shape.tokens, shape.features, shape.width, shape.target_value),
        activations=activation_bytes(shape),
        head=head_bytes(shape),
        closing=3 * weights if on_cpu else 0,
        allocator=int(ALLOCATOR_SHARE * allocated) if on_cpu else 0,
        accumulating=shape.accumulate > 1,
    )


def feature_bytes(tokens: int, features: int, width: int, value: int) -> int:
    """The target's features of that many tokens: the layers that are read, and what the head reads."""
    return tokens * (features + 1) * width * value


def activation_bytes(shape: Shape) -> int:
    """What the drafter's forward keeps until its backward, logits not counted."""
    Q, S = shape.rows * shape.blocks * shape.block_size, shape.rows * shape.tokens
    norm = shape.value if shape.fused_norm else 2 * FLOAT
    layer = layer_bytes(shape)
    layers = shape.layers * Q * shape.width * shape.value + layer if shape.checkpointed else shape.layers * layer
    # the features as fc reads them (a copy when their dtype is not the arithmetic's), its output, normed, the context
    copied = shape.features * shape.value if shape.value != shape.target_value else 0
    context = S * shape.width * (copied + 2 * shape.value + norm)
    final_norm = Q * shape.width * (norm + shape.value)
    # autocast keeps a copy of every weight, the head's too, in the arithmetic's dtype
    cast = shape.value * shape.parameters if shape.value != FLOAT else 0
    head_cast = shape.value * shape.vocabulary * shape.width if shape.value != shape.target_value else 0
    return layers + context + final_norm + cast + head_cast


def layer_bytes(shape: Shape) -> int:
    """One decoder layer, row by row of Layer.forward."""
    Q, S = shape.rows * shape.blocks * shape.block_size, shape.rows * shape.tokens
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = shape.value if shape.fused_norm else 2 * FLOAT
    residual = Q * shape.width * 2 * (norm + shape.value)
    # q before its norm, turned, what attention gives, what o_proj reads
    query = Q * queries * (norm + 3 * shape.value)
    key = (S + Q) * keys * norm
    return residual + query + key + 4 * Q * shape.mlp * shape.value + attended_bytes(shape)


def attended_bytes(shape: Shape) -> int:
    """Keys and values as the kernel reads them, and the mask in the arithmetic's dtype; by the form of the mask."""
    Q = shape.blocks * shape.block_size
    keys = 2 * shape.kv_heads * shape.head_dim * shape.value
    if shape.mask == "blocks":
        return shape.rows * (shape.tokens + Q) * keys
    if shape.mask == "dense":
        return shape.rows * (shape.tokens + Q) * (keys + Q * shape.value)
    tiles = -(-Q // TILE_QUERIES)
    # a tile sees its share of the row, and on average half of the document before it
    seen = min(shape.tokens, shape.tokens // tiles + shape.document // 2) + min(Q, TILE_QUERIES)
    return shape.rows * tiles * seen * (keys + min(Q, TILE_QUERIES) * shape.value)


def head_bytes(shape: Shape) -> int:
    """Logits of slots 1..K-1 and what the loss makes of them, at the largest moment."""
    count = shape.rows * shape.blocks * (shape.block_size - 1) * shape.vocabulary
    narrow = shape.value * count if shape.value != FLOAT else 0
    return LOGITS_ALIVE[shape.objective] * FLOAT * count + narrow


def disk_bytes(plan: Plan, parameters: int, stored_features: int) -> int:
    """The run's directory at its end: kept checkpoints and the best one, the export, features, metrics."""
    saves = -(-plan.steps // plan.save_every) if plan.save_every else 1
    # the best one is kept beside the newest; of equals the newest is the best, so it may be one of them
    checkpoints = min(saves, plan.keep + 1)
    lines = plan.steps * STEP_LINE + _evaluations(plan) * EVALUATION_LINE
    return checkpoints * checkpoint_bytes(parameters) + FLOAT * parameters + stored_features + lines


def checkpoint_bytes(parameters: int) -> int:
    """Masters and two moments, float32; that much room is needed besides while the next one is written."""
    return 3 * FLOAT * parameters


def duration(plan: Plan, rates: Rates) -> Duration:
    """Steps at the measured rate; every evaluation as slow as with the untrained drafter."""
    during = _evaluations(plan) * plan.prompts * rates.prompt_s
    closing = plan.final_prompts * (rates.prompt_s + rates.plain_prompt_s)
    return Duration(plan.steps * rates.step_s, during + closing)


def _evaluations(plan: Plan) -> int:
    """At every multiple, and at the last step."""
    if not plan.evaluate_every:
        return 1
    return -(-plan.steps // plan.evaluate_every)
