"""The two files of an export, config.json and safetensors weights: written whole, read with every tensor checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import Qwen3Config

from dflash.drafter.model import DFlashDrafter
from dflash.durable import durable_directory
from dflash.errors import CheckpointError, ConfigError

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def write_files(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes an export; OutputError when `directory` is in use or cannot be written, and then nothing is left there."""
    plain = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    with durable_directory(directory) as partial:
        (partial / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        (partial / WEIGHTS).write_bytes(save(plain, {"format": "pt"}))


def drafter_weights(drafter: DFlashDrafter) -> dict[str, Tensor]:
    """The trainable tensors by their z-lab names: no embedding, no head."""
    weights = drafter.state_dict()
    assert not {"embed_tokens", "lm_head"} & {name.split(".")[0] for name in weights}
    return weights


def weights_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The dtype field of a config."""
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of an export; CheckpointError when there is none or it cannot be read."""
    try:
        fields = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise _broken(directory, f"no {CONFIG}") from error
    except ValueError as error:
        raise _broken(directory, f"{CONFIG} that is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _broken(directory, f"{CONFIG} that is not a JSON object")
    return fields


def need(fields: Mapping[str, Any], name: str, kind: type, directory: Path) -> Any:
    """A field of config.json of the right type; CheckpointError otherwise."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{name} in config.json", repr(value), "export the drafter again", where=str(directory))
    return value


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the directory's safetensors files, on the CPU; pickles are never read. CheckpointError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise _broken(directory, "no safetensors file (pickles are not read)")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise _broken(directory, f"{file.name} that cannot be read ({error})") from error
    return tensors


def build(
    config: Qwen3Config, layer_ids: list[int], block_size: int, mask_token_id: int, directory: Path
) -> DFlashDrafter:
    """The drafter a config describes, weights still random; CheckpointError when it makes no sense."""
    try:
        return DFlashDrafter(config, layer_ids, block_size, mask_token_id=mask_token_id)
    except (ConfigError, TypeError, RuntimeError) as error:
        raise _broken(directory, f"{CONFIG} that fits no drafter ({error})") from error


def load_weights(drafter: DFlashDrafter, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Puts tensors into the drafter; CheckpointError: one missing, unknown, of a wrong shape or not finite."""
    expected = drafter.state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        got = f"no {missing[0]}" if missing else f"the unknown {extra[0]}"
        more = f" and {len(missing) + len(extra) - 1} more" if len(missing) + len(extra) > 1 else ""
        raise CheckpointError("the drafter's tensors", got + more, "check the format", where=str(directory))
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            wanted, got = (str(list(x.shape)) for x in (expected[name], tensor))
            raise CheckpointError(f"{name} of {wanted}", got, "config and weights do not match", where=str(directory))
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"finite {name}", "NaN or infinity", "use another checkpoint", where=str(directory))
    drafter.load_state_dict(dict(tensors))


def _broken(directory: Path, got: str) -> CheckpointError:
    return CheckpointError("a whole export", got, "export the drafter again", where=str(directory))
