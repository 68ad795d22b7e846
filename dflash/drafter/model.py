"""DFlashDrafter: training forward over every block of a row at once, and the step-by-step forward of decoding."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config

from dflash.attention.base import AttentionBackend
from dflash.attention.kernels import KERNELS, sdpa_kernel
from dflash.attention.select import choose
from dflash.drafter.anchors import Anchors, draw_anchors
from dflash.drafter.block_mask import block_mask
from dflash.drafter.blocks import Blocks, PlainRows, Rows, cut_blocks, document_ids_from_lengths
from dflash.drafter.cache import DraftCache, decode_mask
from dflash.drafter.config import SLIDING
from dflash.drafter.inputs import check_inputs
from dflash.drafter.layers import Attention, Layer, RMSNorm
from dflash.drafter.mask import Layout, dense_mask, document_starts, spans
from dflash.drafter.metrics import Metrics, count
from dflash.drafter.objectives import OBJECTIVES, Objective, Targets, slot_decay
from dflash.drafter.rope import Rope
from dflash.drafter.tile_mask import tile_mask
from dflash.errors import ConfigError, TargetError
from dflash.features import Features


def flex_attention_forward(
    module: Attention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None
) -> tuple[Tensor, None]:
    """The one call of every layer: query [B, heads, Q, D], key, value [B, kv_heads, S, D] -> [B, Q, heads, D].

    Looked up in this module at each call: replacing `dflash.drafter.model.flex_attention_forward` reaches every layer.
    A training mask (4-D, tiles or BlockMask) runs the kernel as compiled; a decoding mask (2-D or none) grows with
    each step and runs plain SDPA, or every step would recompile.
    """
    training = attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2)
    attend = module.attend if training else sdpa_kernel
    out = attend(query, key, value, attention_mask, module.scaling if scaling is None else scaling)
    return out.transpose(1, 2), None


class Terms(NamedTuple):
    """One micro-batch: backward on `loss_sum`, then divide gradients by the global batch's sum of `weight_sum`."""

    loss_sum: Tensor
    weight_sum: Tensor
    metrics: Metrics


class DFlashDrafter(nn.Module):
    """Block-diffusion drafter (arXiv 2602.06036); parameters carry the z-lab checkpoint's names.

    Trainable: fc, hidden_norm, layers, norm. Master weights keep the dtype they are built in (float32); bfloat16
    compute is torch.autocast round the forward. `embed_tokens` and `lm_head` [V, H] are the target's, frozen, not in
    state_dict.
    """

    embed_tokens: Tensor | None
    lm_head: Tensor | None

    def __init__(
        self,
        config: Qwen3Config,
        target_layer_ids: Sequence[int],
        block_size: int = 16,
        max_anchors: int = 512,
        mask_token_id: int | None = None,
    ) -> None:
        """Shapes: L = len(target_layer_ids) features a token, K = block_size, N = max_anchors. Errors: ConfigError."""
        super().__init__()
        self.config = config
        self.target_layer_ids = tuple(target_layer_ids)
        self.block_size, self.max_anchors = block_size, max_anchors
        self.mask_token_id = _checked_mask_token(mask_token_id, config)
        _check_shape(self, config)
        with torch.device(
            "meta"
        ):  # built without values: nn.Linear's own initialisation would draw from the global RNG
            self.fc = nn.Linear(len(self.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.to_empty(device=torch.get_default_device())
        self.rope = Rope(config)
        self.register_buffer("embed_tokens", None, persistent=False)
        self.register_buffer("lm_head", None, persistent=False)
        self.bound = False
        self.checkpoint_layers = False
        self.backend: AttentionBackend | None = None
        self._run: list[Any] = list(self.layers)
        self._layouts = [self._layout(kind) for kind in config.layer_types]
        self.reset_parameters(torch.Generator().manual_seed(0))

    # ---- building

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws every trainable weight from `generator` (CPU): normal(0, initializer_range), norms at 1."""
        for name, weight in self.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            else:
                drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
                weight.copy_(drawn.normal_(0.0, self.config.initializer_range, generator=generator))

    def bind_target(self, embedding: Tensor, head: Tensor | None = None) -> None:
        """Takes the target's embedding and head [V, H], frozen; head none: tied. Errors: TargetError."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embedding", embedding), ("head", embedding if head is None else head)):
            if tuple(weight.shape) != expected:
                raise TargetError(
                    f"a target {name} of {expected}", str(tuple(weight.shape)), "check the drafter's config"
                )
        self.embed_tokens = embedding.detach()
        # one tensor when tied: two buffers would become two copies in `.to(device)`
        self.lm_head = None if head is None or head is embedding else head.detach()
        self.bound = True

    def use_attention(self, backend: AttentionBackend) -> None:
        """Builds attention for `backend`, once: the kernel is compiled for all layers, or each layer as a whole."""
        self.backend = backend
        kernel = KERNELS[backend.mask]
        whole_layer = backend.scope == "layer"
        attend = kernel if whole_layer else backend.strategy.compile(kernel, role="attention")
        for layer in self._decoder_layers():
            layer.self_attn.attend = attend
        self._run = [
            backend.strategy.compile(layer.forward, role="layer") if whole_layer else layer for layer in self.layers
        ]

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """fc, hidden_norm, layers, norm: all the parameters there are, because the target's are buffers."""
        return self.parameters()

    def _decoder_layers(self) -> Iterator[Layer]:
        return (cast(Layer, layer) for layer in self.layers)

    def _layout(self, kind: str) -> Layout:
        if kind != SLIDING:
            return Layout()
        return Layout(self.config.sliding_window, getattr(self.config, "sliding_causal_block", True))

    # ---- training

    def forward(
        self,
        all_hidden_states: Tensor,
        verifier_last_hidden: Tensor,
        input_ids: Tensor,
        loss_mask: Tensor,
        lengths: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_soft_labels: bool = False,
        gamma: float | None = None,
        anchors: Anchors | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One micro-batch -> (mean weighted loss, metrics); the signature that training scripts call it by.

        all_hidden_states [B, T, L, H], verifier_last_hidden [B, T, H], input_ids [B, T], loss_mask [B, T] bool,
        lengths of the row's documents [n] or [B, n], position_ids [B, T] (none: from 0 in each document), gamma in
        slots, anchors none: drawn with seed 0, epoch 0. Normalised over this micro-batch only: see `terms`.
        Errors: DataError for inputs of another shape, ids outside the vocabulary, a mask of other values than 0 and 1.
        """
        features = Features(all_hidden_states, verifier_last_hidden)
        shape = (self.config.vocab_size, self.config.hidden_size)
        mask = check_inputs(features, input_ids, loss_mask, len(self.target_layer_ids), shape)
        document_ids = document_ids_from_lengths(lengths, input_ids)
        if position_ids is None:
            position_ids = _positions(document_ids)
        rows = PlainRows(input_ids, mask, position_ids, document_ids)
        objective = OBJECTIVES["kl" if use_soft_labels else "ce"]()
        out = self.terms(rows, features, anchors or self._own_anchors(rows), objective, gamma)
        m = out.metrics
        loss = out.loss_sum / out.weight_sum.clamp_min(torch.finfo(torch.float32).tiny)
        return loss, {
            "loss": loss.detach(),
            "accuracy": m.accuracy,
            "tau": m.tau,
            "slot_accuracy": m.slot_accuracy,
            "conditional_acceptance": m.conditional_acceptance,
            "weight_sum": m.weight_sum,
            "blocks": m.blocks,
        }

    def terms(
        self, rows: Rows, features: Features, anchors: Anchors, objective: Objective, gamma: float | None = None
    ) -> Terms:
        """The trainer's forward: unnormalised sums of one micro-batch, so that the global batch shares one divisor."""
        blocks = cut_blocks(rows, anchors, self.block_size, self.mask_token_id)
        hidden = self.block_hidden(rows, features.hidden, anchors, blocks)
        logits = self.logits(hidden)
        teacher = self._teacher(features.last, anchors) if objective.needs_teacher else None
        decay = slot_decay(self.block_size, gamma, logits.device)
        loss_sum, weight_sum = objective(logits, Targets(blocks.labels, blocks.valid, decay, teacher))
        predicted = logits.detach().argmax(-1)
        return Terms(loss_sum, weight_sum, count(predicted, blocks.labels, blocks.valid, loss_sum, weight_sum))

    def block_hidden(self, rows: Rows, hidden: Tensor, anchors: Anchors, blocks: Blocks) -> Tensor:
        """Target features [B, T, L, H] -> final hidden states of slots 1..K-1 [B, N, K-1, H], normed."""
        backend = self._backend(hidden.device)
        ctx = self.context(hidden)
        x = self._embed(blocks.ids.flatten(1), ctx.dtype)
        context_rotation = self.rope(rows.position_ids, ctx.dtype)
        block_rotation = self.rope(blocks.position_ids.flatten(1), ctx.dtype)
        masks = self._masks(anchors, rows.document_ids, backend)
        for run, layout in zip(self._run, self._layouts, strict=True):
            inputs = (x, ctx, (context_rotation, block_rotation), masks[layout], _choke_point)
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x = run(*inputs)
        B, N, K = blocks.ids.shape
        return self.norm(x.view(B, N, K, -1)[:, :, 1:])  # type: ignore[no-any-return]

    def context(self, hidden: Tensor) -> Tensor:
        """Target features [B, T, L, H] -> the context every layer attends to [B, T, H]."""
        weight = self.fc.weight
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        return self.hidden_norm(self.fc(hidden.flatten(2)))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's frozen head: [..., H] -> [..., V]."""
        head = self._frozen()[1]
        return F.linear(hidden.to(head.dtype), head)

    def _teacher(self, last: Tensor, anchors: Anchors) -> Tensor:
        """The target's logits for slots 1..K-1 [B, N, K-1, V]: slot k is predicted from position anchor + k - 1."""
        slot = torch.arange(self.block_size - 1, device=last.device)
        index = (anchors.position[..., None] + slot).clamp_max(last.shape[1] - 1)
        wide = index.flatten(1)[..., None].expand(-1, -1, last.shape[-1])
        with torch.no_grad():
            return self.logits(last.gather(1, wide).view(*index.shape, -1))

    def _masks(self, anchors: Anchors, document_ids: Tensor, backend: AttentionBackend) -> dict[Layout, Any]:
        """One mask a distinct layout."""
        seen = {layout: spans(anchors, document_ids, self.block_size, layout) for layout in set(self._layouts)}
        if backend.mask == "blocks":
            return {layout: block_mask(s) for layout, s in seen.items()}
        if backend.mask == "tiles":
            return {layout: tile_mask(s, self.block_size) for layout, s in seen.items()}
        return {layout: dense_mask(s) for layout, s in seen.items()}

    def _own_anchors(self, rows: Rows) -> Anchors:
        B = rows.input_ids.shape[0]
        documents = int(rows.document_ids.max()) + 1
        names = [[row * documents + index for index in range(documents)] for row in range(B)]
        drawn = draw_anchors(
            rows.loss_mask,
            rows.document_ids,
            names,
            block_size=self.block_size,
            max_anchors=self.max_anchors,
            seed=0,
            epoch=0,
        )
        return drawn.to(rows.input_ids.device)

    # ---- decoding

    @torch.no_grad()
    def draft(self, cache: DraftCache, new_hidden: Tensor, block_ids: Tensor, start: int) -> Tensor:
        """Drafts one block after taking in the context tokens verified since the last call.

        new_hidden [1, t, L, H]: features of positions cache.length .. start-1; block_ids [1, K]: last token, then mask
        tokens; start: position of the last token -> logits [1, K-1, V]. Positions count from 0.
        """
        assert cache.length + new_hidden.shape[1] == start, "features must reach exactly to the block"
        ctx = self.context(new_hidden)
        device = ctx.device
        rotation = self.rope(torch.arange(cache.length, start, device=device)[None], ctx.dtype)
        block_rotation = self.rope(torch.arange(start, start + block_ids.shape[1], device=device)[None], ctx.dtype)
        x = self._embed(block_ids, ctx.dtype)
        for index, (layer, layout) in enumerate(zip(self._decoder_layers(), self._layouts, strict=True)):
            cache.append(index, *layer.self_attn.keys_values(ctx, rotation))
            context = cache.read(index, start)
            mask = None
            if layout.window is not None:
                mask = decode_mask(start, block_ids.shape[1], layout.window, layout.causal, device)
            x = layer.over_keys(x, context, block_rotation, mask, _choke_point)
        cache.advance(new_hidden.shape[1])
        return self.logits(self.norm(x[:, 1:]))

    def new_cache(self) -> DraftCache:
        """An empty cache for one sequence."""
        return DraftCache(len(self.layers))

    # ---- inside

    def _embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self._frozen()[0]).to(dtype)

    def _frozen(self) -> tuple[Tensor, Tensor]:
        """The target's embedding and head; without a target, random ones and a warning."""
        if self.embed_tokens is None:
            self._bind_random()
        assert self.embed_tokens is not None
        return self.embed_tokens, self.embed_tokens if self.lm_head is None else self.lm_head

    def _bind_random(self) -> None:
        """Lets a script without a target run (the case's does); its loss means nothing, and it is told so."""
        warnings.warn("no target bound: embedding and head are random; call bind_target first", stacklevel=2)
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.config.vocab_size, self.config.hidden_size)
        drawn = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, 0.02, generator=generator)
        self.embed_tokens, self.lm_head = drawn.to(self.fc.weight).unbind(0)

    def _backend(self, device: torch.device) -> AttentionBackend:
        if self.backend is None:
            self.use_attention(choose("auto", "auto", device))
        assert self.backend is not None
        return self.backend


def _choke_point(
    module: Attention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None
) -> tuple[Tensor, None]:
    """Reads the module's name at each call, so that a replacement made at any time is the one called."""
    return flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling)


def _positions(document_ids: Tensor) -> Tensor:
    """Positions counted from 0 in each document [B, T]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    return index - document_starts(document_ids)


def _checked_mask_token(mask_token_id: int | None, config: Qwen3Config) -> int:
    if mask_token_id is None:
        raise ConfigError("a mask_token_id", "none", "name a token of the vocabulary that the data never contains")
    if not 0 <= mask_token_id < config.vocab_size:
        raise ConfigError(f"a mask_token_id in 0..{config.vocab_size - 1}", str(mask_token_id), "choose one inside")
    if mask_token_id == config.pad_token_id:
        raise ConfigError(
            "a mask_token_id that is not the pad token", str(mask_token_id), "choose another unused token"
        )
    return mask_token_id


def _check_shape(drafter: DFlashDrafter, config: Qwen3Config) -> None:
    if drafter.block_size < 2 or drafter.max_anchors < 1:
        got = f"block_size {drafter.block_size}, max_anchors {drafter.max_anchors}"
        raise ConfigError("block_size >= 2 and max_anchors >= 1", got, "slot 0 is known, so a block needs two slots")
    n_target = getattr(config, "num_target_layers", None)
    wrong = [i for i in drafter.target_layer_ids if i < 0 or (n_target is not None and i >= n_target)]
    if wrong or not drafter.target_layer_ids:
        raise ConfigError(
            f"target layer ids in 0..{(n_target or 0) - 1}", str(drafter.target_layer_ids), "change layer_ids"
        )
