"""Which formats there are, which one a directory holds, and whether two drafters say the same."""

from collections.abc import Callable
from pathlib import Path

import torch

from dflash.drafter.model import DFlashDrafter
from dflash.export.files import read_config
from dflash.export.speculators import read_speculators, write_speculators
from dflash.export.zlab import read_zlab, write_zlab
from dflash.target import Target

WRITERS: dict[str, Callable[[DFlashDrafter, Target, Path], None]] = {
    "zlab": write_zlab,
    "speculators": write_speculators,
}


def read_export(directory: Path | str) -> DFlashDrafter:
    """Reads an export of either format; CheckpointError when it is neither, or damaged."""
    directory = Path(directory)
    read = read_speculators if "speculators_model_type" in read_config(directory) else read_zlab
    return read(directory)


def compare(a: DFlashDrafter, b: DFlashDrafter, context: int = 24) -> float:
    """Largest difference between the logits two bound drafters give after `context` random feature positions."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, context, len(a.target_layer_ids), a.config.hidden_size, generator=generator)
    block = torch.full((1, a.block_size), a.mask_token_id)
    block[0, 0] = 0
    outputs = []
    for drafter in (a, b):
        device = drafter.fc.weight.device
        outputs.append(drafter.draft(drafter.new_cache(), hidden.to(device), block.to(device), context).float().cpu())
    return float((outputs[0] - outputs[1]).abs().max())
