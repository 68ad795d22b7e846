"""The frozen target: a Hugging Face causal language model that turns tokens into Features."""

import hashlib
import inspect
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from dflash.errors import ConfigError, DataError, TargetError
from dflash.features import Features
from dflash.paths import missing_target

MIN_LAYERS = 4
# enough of the weights to tell two training runs apart without reading a 50 GB model
SAMPLES_PER_FILE, SAMPLE_BYTES = 64, 1 << 16


class Target:
    """A frozen causal language model with its tokenizer; everything the drafter borrows from it is here.

    Attributes: tokenizer, config (of the text model), model, embedding [V, H], head [V, H] (the embedding when tied),
    n_layers, hidden_size, vocab_size, fingerprint, eos_token_ids, device, dtype, path.
    """

    def __init__(self, model: Any, tokenizer: Any, path: Path, fingerprint: str) -> None:
        """Wraps a loaded model; use `Target.load`. Raises TargetError when its layers or its head cannot be read."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.path, self.fingerprint = tokenizer, path, fingerprint
        self.config = model.config.get_text_config(decoder=True)
        self.backbone = model.get_decoder()
        self._head_module = model.get_output_embeddings()
        self._layers = _decoder_layers(self.backbone, path)
        self.n_layers: int = len(self._layers)
        self.hidden_size: int = self.config.hidden_size
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.head: Tensor = self._head_module.weight
        self.vocab_size: int = self.head.shape[0]
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        # the argument was renamed during transformers 5
        self._cache_argument = "cache" if "cache" in inspect.signature(self.backbone.forward).parameters else (
            "past_key_values"
        )
        # set by session.check_rollback once a recurrent target has shown that its cache can be put back
        self.rollback_checked = False
        # hooks stay for good and write to the calling thread's own sink: threads may share a target
        self._sink = threading.local()
        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(self._hook(index))
        self._check_head()

    @classmethod
    def load(
        cls, path: Path | str, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
    ) -> "Target":
        """Loads a model directory from disk, never from the network; TargetError when it is not a usable target."""
        directory = Path(path)
        _check_directory(directory, trust_remote_code)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            with _no_progress_bar():
                tokenizer = AutoTokenizer.from_pretrained(directory, **options)
                model, report = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
                )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _load_error(directory, error) from error
        _check_complete(report, directory)
        return cls(model.to(device), tokenizer, directory, fingerprint(directory))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the features."""
        return self.embedding.dtype

    def features(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Features:
        """Features of one document [T] -> hidden [T, L, H], last [T, H]; no gradient. ConfigError: id out of range."""
        ids = check_layer_ids(layer_ids, self.n_layers)
        if input_ids.numel() == 0:
            raise DataError("a document of at least one token", "an empty one", "drop it while preparing")
        with torch.no_grad(), self._captured(ids) as outputs:
            last = self.backbone(input_ids=input_ids.to(self.device, torch.long)[None], use_cache=False)
        return Features(torch.stack([outputs[i][0] for i in ids], dim=1), last.last_hidden_state[0])

    def forward_cached(
        self, input_ids: Tensor, position_ids: Tensor, cache: Any, layer_ids: Sequence[int]
    ) -> Features:
        """Appends tokens [1, t] at positions [1, t] to a transformers cache: hidden [t, L, H], last [t, H]."""
        with self._captured(layer_ids) as outputs:
            result = self.backbone(
                input_ids=input_ids, position_ids=position_ids, use_cache=True, **{self._cache_argument: cache}
            )
        last = result.last_hidden_state[0]
        hidden = torch.stack([outputs[i][0] for i in layer_ids], dim=1) if layer_ids else last[:, None][:, :0]
        return Features(hidden, last)

    def logits(self, last: Tensor) -> Tensor:
        """The head's logits [..., V] of `Features.last` [..., H]; no norm is applied here."""
        return nn.functional.linear(last, self.head)

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            wanted: dict[int, Tensor] | None = getattr(self._sink, "outputs", None)
            if wanted is not None and index in wanted:
                wanted[index] = output[0] if isinstance(output, tuple) else output

        return keep

    @contextmanager
    def _captured(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collects the outputs of layers during one forward of the calling thread; per thread, restored on exit."""
        outputs: dict[int, Tensor] = dict.fromkeys(layer_ids, torch.empty(0))
        self._sink.outputs = outputs
        try:
            yield outputs
        finally:
            self._sink.outputs = None

    def _check_head(self) -> None:
        """A head with a bias, a scale or a soft cap would make the drafter's logits differ from the target's."""
        if getattr(self.config, "final_logit_softcapping", None) is not None:  # nothing to see while logits are small
            raise _unlike_head("final_logit_softcapping", self.path)
        ids = torch.arange(min(4, self.vocab_size), device=self.device)
        with torch.no_grad():
            own = self.logits(self.features(ids, [0]).last)
            real = self.model(input_ids=ids[None], use_cache=False).logits[0]
        if not torch.allclose(own.float(), real.float(), rtol=1e-2, atol=1e-2):
            got = f"logits that differ by up to {(own - real).abs().max().item():.3g}"
            raise _unlike_head(got, self.path)


def _unlike_head(got: str, path: Path) -> TargetError:
    return TargetError(
        "a target whose logits are its head matrix times its last hidden state", got,
        "a head with bias, scaling or soft cap is not supported", where=str(path),
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keeps transformers' own bar off the run's display; per process, restored on exit."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _decoder_layers(backbone: nn.Module, path: Path) -> nn.ModuleList:
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(
            "a decoder with a `layers` list", type(backbone).__name__,
            "use a llama, qwen2, qwen3 or similar causal language model", where=str(path),
        )
    if len(layers) < MIN_LAYERS:
        raise _too_few_layers(len(layers), str(path))
    return layers


def _too_few_layers(n_layers: int, where: str = "") -> TargetError:
    return TargetError(f"a target of at least {MIN_LAYERS} layers", f"{n_layers}", "use a deeper target", where=where)


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The generation config's ids where it has them, else the model's, else the tokenizer's."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _check_directory(directory: Path, trust_remote_code: bool) -> None:
    where, config = str(directory), directory / "config.json"
    if not config.is_file():
        if not directory.is_dir():
            raise missing_target(where)
        got = "no config.json in it"
        raise TargetError("a Hugging Face model directory", got, "download the model and give its path", where=where)
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TargetError("JSON in config.json", str(error), "download the model again", where=where) from error
    needs_code = "auto_map" in fields and fields.get("model_type") not in CONFIG_MAPPING
    if needs_code and not trust_remote_code:
        raise _needs_remote_code(where)


def _check_complete(report: dict[str, Any], directory: Path) -> None:
    """transformers only warns of weights it had to make up."""
    missing = sorted(report.get("missing_keys", ())) + sorted(str(x) for x in report.get("mismatched_keys", ()))
    if missing:
        raise TargetError(
            "every weight of the model", f"no {missing[0]}", "download the model again", where=str(directory)
        )


def _needs_remote_code(where: str) -> TargetError:
    return TargetError(
        "a target that transformers knows", "one that runs Python code from its own directory",
        "read that code, then pass --target.trust-remote-code", where=where,
    )


def _load_error(directory: Path, error: Exception) -> TargetError:
    if "trust_remote_code" in str(error):
        return _needs_remote_code(str(directory))
    got = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TargetError(
        "a causal language model with safetensors weights and a tokenizer", got,
        "check that the directory is complete", where=str(directory),
    )


def load_target_config(path: Path | str) -> Any:
    """The text configuration of a model directory, without its weights; TargetError when it cannot be read."""
    _check_directory(Path(path), trust_remote_code=False)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise _load_error(Path(path), error) from error


def fingerprint(directory: Path) -> str:
    """sha256 over config.json and, of every weights file, its size, header and evenly spread samples."""
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for weights in sorted(directory.glob("*.safetensors")):
        size = weights.stat().st_size
        digest.update(f"{weights.name}:{size}".encode())
        with weights.open("rb") as stream:
            for sample in range(SAMPLES_PER_FILE):
                stream.seek(size * sample // SAMPLES_PER_FILE)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def choose_layer_ids(n_target: int, n: int) -> list[int]:
    """Target layers to read, `n` spread over `n_target` as in the z-lab release (arXiv 2602.06036, section 4.1)."""
    if n_target < MIN_LAYERS:
        raise _too_few_layers(n_target)
    if n < 1:
        raise ConfigError("at least one feature", str(n), "set --drafter.features to 1 or more")
    if n == 1:
        return [n_target // 2]
    return [round(1 + i * (n_target - 4) / (n - 1)) for i in range(n)]


def check_layer_ids(layer_ids: Sequence[int], n_layers: int) -> list[int]:
    """The ids, when each names a layer of a target of `n_layers`; else ConfigError."""
    bad = [i for i in layer_ids if not 0 <= i < n_layers]
    if bad or not layer_ids:
        got = f"{bad[0]}" if bad else "none"
        raise ConfigError(f"layer ids in 0..{n_layers - 1}", got, "correct --drafter.layer-ids")
    return list(layer_ids)


def resolve_mask_token(tokenizer: Any, config: Any, requested: int | None) -> int:
    """The token of unknown slots: the requested one, the tokenizer's own, or the first embedding row no token uses.

    Never the padding or an end token, always inside the vocabulary; ConfigError or TargetError otherwise.
    """
    vocab_size = config.get_text_config(decoder=True).vocab_size
    if requested is not None:
        return _checked_mask(requested, vocab_size, _reserved(tokenizer, config))
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None:
        return _checked_mask(own, vocab_size, _reserved(tokenizer, config))
    if len(tokenizer) < vocab_size:
        return _checked_mask(len(tokenizer), vocab_size, _reserved(tokenizer, config))
    raise TargetError(
        "a mask token or an unused embedding row", f"{vocab_size} tokens, all of them used",
        "name a token that never occurs in the data with --drafter.mask-token-id",
    )


def _reserved(tokenizer: Any, config: Any) -> dict[int, str]:
    reserved: dict[int, str] = {}
    for source in (config, tokenizer):
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            ids = getattr(source, name, None)
            for token in [ids] if isinstance(ids, int) else ids or ():
                reserved[token] = name.removesuffix("_token_id")
    return reserved


def _checked_mask(token: int, vocab_size: int, reserved: dict[int, str]) -> int:
    remedy = "choose another with --drafter.mask-token-id"
    if not 0 <= token < vocab_size:
        raise ConfigError(f"a mask token id in 0..{vocab_size - 1}", str(token), remedy)
    if token in reserved:
        raise ConfigError("a mask token of its own", f"{token}, the {reserved[token]} token", remedy)
    return token
