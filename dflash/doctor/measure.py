"""Facts about a run that cannot be computed: sizes of what is loaded, memory that is free, seconds of a few steps."""

import shutil
import statistics
from itertools import islice
from pathlib import Path

import torch

from dflash.data.rows import batches
from dflash.decode import greedy_generate, speculative_generate
from dflash.doctor.base import Subject
from dflash.doctor.estimate import FLOAT, Plan, Rates, Shape
from dflash.evaluate import evaluating
from dflash.features import FeatureSource
from dflash.parts import DTYPES
from dflash.progress import seeded
from dflash.step import Stepper
from dflash.train import total_steps

WARM_UP, TIMED = 2, 4


def shape_of(subject: Subject) -> Shape:
    """The sizes of the run that the configuration describes."""
    config, drafter, target = subject.config, subject.drafter, subject.target
    made, store = drafter.config, subject.store
    return Shape(
        rows=config.data.batch_rows,
        tokens=config.data.row_tokens,
        blocks=drafter.max_anchors,
        block_size=drafter.block_size,
        width=made.hidden_size,
        mlp=made.intermediate_size,
        vocabulary=made.vocab_size,
        layers=made.num_hidden_layers,
        heads=made.num_attention_heads,
        kv_heads=made.num_key_value_heads,
        head_dim=made.head_dim,
        features=len(drafter.target_layer_ids),
        parameters=sum(p.numel() for p in drafter.parameters()),
        target_bytes=sum(p.numel() * p.element_size() for p in target.model.parameters()),
        target_value=target.dtype.itemsize,
        value=DTYPES[config.dtype].itemsize,
        objective=config.objective.name,
        mask=subject.attention.mask,
        fused_norm=subject.device.type == "cuda",
        accumulate=config.optim.micro_batches,
        checkpointed=config.checkpoint_layers,
        document=store.meta.tokens // len(store),
    )


def plan_of(subject: Subject) -> Plan:
    """What the run will do."""
    config = subject.config
    return Plan(
        steps=total_steps(config, subject.parts),
        save_every=config.save_every,
        keep=config.keep,
        evaluate_every=config.eval.every,
        prompts=min(config.eval.prompts, len(subject.parts.prompts)),
        final_prompts=len(subject.parts.prompts),
    )


def measured_rates(subject: Subject) -> Rates:
    """A few real steps on the first rows, and one prompt; the parts are thrown away afterwards."""
    config, parts = subject.config, subject.parts
    source = FeatureSource(parts.target, None, "online", list(parts.drafter.target_layer_ids))
    stepper = Stepper(config, parts, source, WARM_UP + TIMED)
    stream = batches(parts.store, config.data, config.seed)
    with seeded(config.seed), parts.attention.strategy.thread_scope():
        micro_batches = (list(islice(stream, config.optim.micro_batches)) for _ in range(WARM_UP + TIMED))
        seconds = [stepper.step(number, some).seconds for number, some in enumerate(micro_batches)]
    prompt, tokens = parts.prompts[0], config.eval.max_new_tokens
    with evaluating(parts.drafter):
        drafted = speculative_generate(parts.target, parts.drafter, prompt, max_new_tokens=tokens)
    plain = greedy_generate(parts.target, prompt, max_new_tokens=tokens)
    return Rates(statistics.median(seconds[WARM_UP:]), drafted.seconds, plain.seconds)


def process_bytes(subject: Subject, shape: Shape) -> int:
    """Interpreter, libraries and data of this process: what was resident when the parts had just been built, less them.

    It cannot be read earlier: transformers and torch load a third of their code with the first model.
    """
    subject.parts  # noqa: B018 - builds them
    assert subject.built_bytes is not None
    return max(0, subject.built_bytes - shape.target_bytes - FLOAT * shape.parameters)


def available_bytes(device: torch.device) -> int | None:
    """Memory that a new process could use on `device`; none where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    room = _container_room()
    return room if free is None else free if room is None else min(free, room)


def _container_room() -> int | None:
    """What is left of a container's limit; none without one."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def free_disk_bytes(path: Path) -> int:
    """Free space where `path` is or would be made."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free
