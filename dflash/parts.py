"""The parts of a run, built from its configuration: target, data, drafter, attention, optimizer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from dflash.assets import EMBEDDED, embedded_path
from dflash.attention.base import AttentionBackend
from dflash.attention.select import Workload, choose
from dflash.config import DEVICE, DataOptions, TargetOptions, TrainConfig
from dflash.data.documents import DocumentStore
from dflash.data.prompts import heldout_prompts
from dflash.data.sources import mask_source, open_documents
from dflash.data.template import Encoder
from dflash.drafter.anchors import candidates
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.objectives import OBJECTIVES, Objective
from dflash.errors import ConfigError, DataError
from dflash.feature_store import FeatureStore
from dflash.features import FeatureSource
from dflash.optim import build_optimizer
from dflash.pipeline.placement import Placement, layout, place
from dflash.pipeline.ranks import local_device
from dflash.pipeline.sharding import check_shard, shard
from dflash.run_directory import RunDirectory
from dflash.target import Target, check_layer_ids, choose_layer_ids, resolve_mask_token

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Parts:
    """All that the loop works with."""

    target: Target
    store: DocumentStore
    # token ids of the held-out prompts
    prompts: list[list[int]]
    drafter: DFlashDrafter
    # the drafter's float32 masters by name
    parameters: dict[str, nn.Parameter]
    attention: AttentionBackend
    objective: Objective
    optimizer: torch.optim.AdamW
    # dtype of the drafter's arithmetic
    dtype: torch.dtype
    # the devices of all targets and drafters of this process; target and drafter here are on the first ones
    placement: Placement

    @property
    def device(self) -> torch.device:
        """Where the drafter is; the target may be on another one."""
        return next(iter(self.parameters.values())).device

    def arithmetic(self) -> AbstractContextManager[None]:
        """Autocast round a forward when the arithmetic is not float32; per thread."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


def build(config: TrainConfig, progress: Callable[[int, int], None] | None = None) -> Parts:
    """Loads and checks everything; writes nothing. Errors: TargetError, DataError, ConfigError, StrategyError."""
    placement = resolve_placement(config)
    device = placement.drafters[0]
    workload = Workload(threads=len(placement.drafters), force_unsafe=config.force_unsafe)
    attention = choose(config.attn_strategy, config.attn_kernel, device, scope=config.compile_scope, workload=workload)
    target = load_target(config.target, placement.targets[0])
    drafter = build_drafter(config, target).to(device)
    drafter.use_attention(attention)
    drafter.checkpoint_layers = config.checkpoint_layers
    if config.shard:
        shard(drafter)
    store = training_store(config.data, target, progress)
    store.check_mask_token(drafter.mask_token_id)
    check_blocks(store, drafter.block_size)
    prompts = heldout_prompts(config.data.heldout, target.tokenizer)
    if not prompts:
        raise DataError("at least one held-out prompt", "none", "see --data.heldout", where=config.data.heldout)
    parameters = dict(drafter.named_parameters())
    return Parts(
        target=target,
        store=store,
        prompts=prompts,
        drafter=drafter,
        parameters=parameters,
        attention=attention,
        objective=OBJECTIVES[config.objective.name](),
        optimizer=build_optimizer(parameters, config.optim),
        dtype=DTYPES[config.dtype],
        placement=placement,
    )


def resolve_placement(config: TrainConfig) -> Placement:
    """The devices of this process, from --targets and --drafters, else --device. ConfigError: not there."""
    default = local_device(resolve_device(config.device))
    return place(config.targets, config.drafters, default, torch.cuda.device_count)


def settled(config: TrainConfig, ranks: int = 1) -> TrainConfig:
    """`config` with the micro-batches of a step as a number, for the drafters and ranks there are. Errors: ConfigError.

    It is what a run saves: resumed with other drafters, the steps stay the same.
    """
    drafters = len(resolve_placement(config).drafters)
    if config.shard:
        check_shard(config, drafters, ranks)
    micro_batches = layout(config.optim.accumulate, drafters, 0, ranks).micro_batches
    return replace(config, optim=replace(config.optim, accumulate=micro_batches))


def resolve_device(name: str) -> torch.device:
    """The device an option names; auto: cuda when there is one. ConfigError when this machine does not have it."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if DEVICE.fullmatch(name) is None:
        raise ConfigError("cpu, cuda, cuda:N or auto", repr(name), "change the value", where="--device")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"one of this machine's {count} CUDA devices", name, "use --device cpu", where="--device")
        return torch.device("cuda", device.index or 0)
    return device


def load_target(options: TargetOptions, device: torch.device) -> Target:
    """The target an option names, frozen, on `device`."""
    path = embedded_path("target") if options.path == EMBEDDED else Path(options.path)
    return Target.load(path, DTYPES[options.dtype], device, options.trust_remote_code)


def build_drafter(config: TrainConfig, target: Target) -> DFlashDrafter:
    """A drafter of the configured shape, its weights drawn from the seed, bound to the target's embedding and head."""
    options = config.drafter
    chosen: Sequence[int] | None = options.layer_ids
    if chosen is None:
        chosen = choose_layer_ids(target.n_layers, options.features or options.layers)
    mask_token_id = resolve_mask_token(target.tokenizer, target.config, options.mask_token_id)
    drafter_config = create_drafter_config(
        target.config, options.layers, options.sliding_window, options.sliding_causal_block
    )
    layer_ids = check_layer_ids(chosen, target.n_layers)
    drafter = DFlashDrafter(drafter_config, layer_ids, options.block_size, options.max_anchors, mask_token_id)
    drafter.reset_parameters(torch.Generator().manual_seed(config.seed))
    drafter.bind_target(target.embedding, target.head)
    if options.init == "target":
        from dflash.drafter.initial import init_from_target

        init_from_target(drafter, target.model)
    return drafter


def training_store(
    options: DataOptions, target: Target, progress: Callable[[int, int], None] | None = None
) -> DocumentStore:
    """Opens a prepared store, or tokenises conversations into one in memory."""
    encoder = Encoder(
        target.tokenizer,
        options.row_tokens,
        options.overlong,
        no_assistant=options.no_assistant,
        mask_from=mask_source(options.train, options.mask_from),
    )
    return open_documents(options.train, encoder, progress=progress)


def check_blocks(store: DocumentStore, block_size: int) -> None:
    """DataError when no document has room for a single block; reads documents up to the first that has."""
    for document in store:
        mask = torch.from_numpy(document.loss_mask.copy())[None]
        if candidates(mask, torch.zeros_like(mask, dtype=torch.int64), block_size).any():
            return
    expected = f"an answer of which {block_size} tokens are left for a block"
    remedy = "lower --drafter.block-size, raise --data.row-tokens, or train on longer answers"
    raise DataError(expected, f"none in {len(store)} documents", remedy, where=store.where)


def check_features(config: TrainConfig, parts: Parts, run: RunDirectory) -> None:
    """Before anything is written: DataError for a store that is damaged, of another target, or (offline) not there."""
    options, layer_ids = config.data, parts.drafter.target_layer_ids
    directory = options.feature_store or run.features
    deleted = config.overwrite and directory.resolve().is_relative_to(run.path.resolve())
    if options.features == "offline":
        if deleted:
            remedy = "name one elsewhere with --data.feature-store, or leave out --overwrite"
            raise ConfigError("a feature store outside the run", "one that --overwrite deletes", remedy)
        FeatureStore.check(directory, parts.target, layer_ids)
    elif options.features == "cache" and not deleted and directory.is_dir():
        FeatureStore.for_target(directory, parts.target, layer_ids)


def open_features(config: TrainConfig, parts: Parts, run: RunDirectory) -> FeatureSource:
    """Where the target's features come from; with `cache` the store is made in the run directory or where asked."""
    layer_ids = parts.drafter.target_layer_ids
    mode = config.data.features
    store = None
    if mode != "online":
        directory = config.data.feature_store or run.features
        store = FeatureStore.for_target(directory, parts.target, layer_ids)
    return FeatureSource(parts.target, store, mode, list(layer_ids))
