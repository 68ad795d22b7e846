"""The embedded target: a small Qwen3 language model trained on the Python standard library, with its prompts."""

from pathlib import Path

EMBEDDED = "embedded"


def embedded_path(name: str) -> Path:
    """Path of a shipped asset: `target` (model directory), `train.jsonl` or `heldout.jsonl`."""
    path = Path(__file__).parent / "embedded" / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not among the shipped assets in {path.parent}")
    return path
