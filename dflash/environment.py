"""Where a run runs: versions, processor, devices; written beside its configuration so that a report can show it."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("dflash", "torch", "transformers", "datasets", "safetensors", "numpy")


def environment() -> dict[str, str]:
    """Names and values as text; nothing that names the user or the machine."""
    found = {"python": sys.version.split()[0], "system": f"{platform.system()} {platform.machine()}"}
    found |= {name: _version(name) for name in PACKAGES}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["cpu"] = f"{cores} cores, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
