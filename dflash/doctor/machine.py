"""Checks of the machine: versions, which compile state this torch shares between threads, devices."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash.doctor.base import Check, Subject, failed, passed, warned
from probes.torch_internals import UnsupportedTorch, torch_release
from probes.versions import Reach, VersionReport, measure

OLDEST_PYTHON = (3, 11)
FX_FLAG = "FX tracing flag, during a trace"


def checks(subject: Subject) -> Iterator[Check]:
    """Versions first; what torch shares between threads is measured, not looked up."""
    yield python_check(sys.version_info[:2])
    try:
        torch_release()
    except UnsupportedTorch as error:
        yield failed("torch", str(error), 'install a supported one: pip install "torch>=2.11,<2.16"')
        return
    yield passed("torch", torch.__version__)
    yield sharing_check(measure())
    yield from device_checks(subject.device, torch.get_num_threads(), usable_cores())


def python_check(release: tuple[int, ...]) -> Check:
    """The interpreter's version."""
    shown = ".".join(map(str, release))
    if release < OLDEST_PYTHON:
        return failed("python", shown, "use Python 3.11 or newer")
    return passed("python", shown)


def sharing_check(report: VersionReport) -> Check:
    """What a trace or compile in one thread changes for the others, by probes.versions."""
    name = "shared state"
    if report.surprises:
        odd = report.surprises[0]
        found = f"{odd.name} reaches {odd.found.value}; {odd.expected.value} is known of torch {report.torch_version}"
        return warned(name, found, "see `python -m probes.versions`; keep to --attn-strategy sdpa meanwhile")
    shared = [state for state in report.states if state.found is Reach.PROCESS]
    flag = next((state.found.value for state in report.states if state.name == FX_FLAG), "not measured")
    found = f"{len(shared)} of {len(report.states)} compile states reach every thread; the FX tracing flag: {flag}"
    return passed(name, found)


def device_checks(device: torch.device, threads: int, cores: int) -> Iterator[Check]:
    """The device that computes, and how many threads torch uses beside how many cores there are."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield passed("device", f"{device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
        return
    found = f"{device}, {threads} of {cores} cores"
    if threads > cores:
        yield warned("device", found, f"set OMP_NUM_THREADS={cores}: more threads than cores wait for each other")
    else:
        yield passed("device", found)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota where there is one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return affinity
    return affinity if quota == "max" else max(1, min(affinity, round(int(quota) / int(period))))
