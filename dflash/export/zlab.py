"""The z-lab format, loaded by z-lab's code, SGLang and vLLM: the drafter's own tensors, no embedding and no head.

Fields as read by the public loaders (z-lab/dflash model.py; sgl-project/sglang models/dflash.py; vLLM qwen3_dflash):
sliding layers are causal inside a block unless `is_causal` (z-lab) and `dflash_config.causal` (vLLM) are false.
"""

from pathlib import Path
from typing import Any

from dflash.drafter.config import SLIDING
from dflash.drafter.model import DFlashDrafter
from dflash.errors import CheckpointError
from dflash.export.files import (
    build,
    drafter_weights,
    load_weights,
    need,
    read_config,
    read_tensors,
    weights_dtype,
    write_files,
)
from dflash.export.qwen3_fields import from_fields, to_fields
from dflash.target import Target

ARCHITECTURE = "DFlashDraftModel"


def write_zlab(drafter: DFlashDrafter, target: Target, directory: Path | str) -> None:
    """Writes the drafter in z-lab's format, in the dtype of its weights. OutputError: in use, or no space left."""
    weights = drafter_weights(drafter)
    choices: dict[str, Any] = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": list(drafter.target_layer_ids),
    }
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        # names a file that is not shipped: without the entry AutoModel would load a plain Qwen3 with random weights
        "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
        "model_type": "qwen3",
        "block_size": drafter.block_size,
        "dflash_config": choices,
        "num_target_layers": target.n_layers,
        "dtype": weights_dtype(weights),
        **to_fields(drafter.config),
    }
    if not getattr(drafter.config, "sliding_causal_block", True):
        fields["is_causal"] = choices["causal"] = False
    write_files(Path(directory), fields, weights)


def read_zlab(directory: Path | str) -> DFlashDrafter:
    """Reads a drafter in z-lab's format; bind the target before use. CheckpointError: not one, damaged or unknown."""
    directory = Path(directory)
    fields = read_config(directory)
    if fields.get("architectures") != [ARCHITECTURE]:
        got = f"architectures {fields.get('architectures')}"
        raise CheckpointError(f"architectures ['{ARCHITECTURE}']", got, "name a DFlash drafter", where=str(directory))
    choices = need(fields, "dflash_config", dict, directory)
    config = from_fields(fields, str(directory))
    config.num_target_layers = need(fields, "num_target_layers", int, directory)
    config.sliding_causal_block = _sliding_causal(fields, choices, directory)
    size = need({"block_size": fields.get("block_size", choices.get("block_size"))}, "block_size", int, directory)
    ids, mask = need(choices, "target_layer_ids", list, directory), need(choices, "mask_token_id", int, directory)
    drafter = build(config, ids, size, mask, directory)
    load_weights(drafter, read_tensors(directory), directory)
    return drafter


def _sliding_causal(fields: dict[str, Any], choices: dict[str, Any], directory: Path) -> bool:
    causal = fields.get("is_causal", choices.get("causal"))
    if causal and any(kind != SLIDING for kind in fields.get("layer_types") or [""]):
        raise CheckpointError(
            "full layers that see a block both ways", "is_causal true", "such drafters are not supported here",
            where=str(directory),
        )
    return causal is not False
