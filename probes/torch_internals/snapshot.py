"""All process state that tracing and compiling touch, in one frozen value, and what changed between two of them."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from probes.torch_internals import compiler, fx
from probes.torch_internals.config import config_overrides

RANDOM_FIELDS = frozenset({"rng_torch", "rng_cuda", "rng_python", "rng_numpy"})


@dataclass(frozen=True)
class Snapshot:
    """State at one moment. Per process unless the comment says otherwise."""

    fx_flag: bool  # calling thread only, from torch 2.14
    fx_patcher: bool  # a trace's patcher is installed
    module_call_original: bool
    module_getattr_original: bool
    forward_from_src_original: bool
    is_compiling: bool
    compiling_flag: bool
    exporting_flag: bool
    stance: str
    compile_lock_owner: int | None  # threading.get_ident() of the holder
    current_meta: tuple[tuple[str, str], ...]  # key, repr; annotations are under "custom"
    preserve_node_meta: bool
    pre_dispatch_modes: int
    cuda_set_rng_state_original: bool
    default_dtype: str
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str
    config: tuple[tuple[str, str], ...]  # settings off their default; calling context only, from torch 2.12
    rng_torch: str  # digests of the generators' states
    rng_cuda: str  # "" while CUDA is not initialised
    rng_python: str
    rng_numpy: str  # "" while numpy.random is not imported


@dataclass(frozen=True)
class Difference:
    """One field that changed: `before` and `after` as text."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def snapshot() -> Snapshot:
    """Read all state, changing none and importing nothing; about 1 ms, most of it the settings."""
    torch_rng, cuda_rng, python_rng, numpy_rng = _rng_digests()
    return Snapshot(
        fx_flag=fx.fx_flag(),
        fx_patcher=fx.current_patcher() is not None,
        module_call_original=fx.module_call_is_original(),
        module_getattr_original=fx.module_getattr_is_original(),
        forward_from_src_original=fx.forward_from_src_is_original(),
        is_compiling=compiler.is_compiling(),
        compiling_flag=compiler.compiling_flag(),
        exporting_flag=compiler.exporting_flag(),
        stance=compiler.stance(),
        compile_lock_owner=compiler.compile_lock_state().owner,
        current_meta=tuple(sorted((str(key), repr(value)) for key, value in fx.current_meta().copy().items())),
        preserve_node_meta=fx.preserves_node_meta(),
        pre_dispatch_modes=fx.pre_dispatch_mode_count(),
        cuda_set_rng_state_original=cuda_set_rng_state_is_original(),
        default_dtype=str(torch.get_default_dtype()),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=torch.get_float32_matmul_precision(),
        config=tuple(sorted(config_overrides().items())),
        rng_torch=torch_rng,
        rng_cuda=cuda_rng,
        rng_python=python_rng,
        rng_numpy=numpy_rng,
    )


# The values that every torch process has when no thread traces, compiles, exports or scopes a stance.
AT_REST: dict[str, object] = {
    "fx_flag": False,
    "fx_patcher": False,
    "module_call_original": True,
    "module_getattr_original": True,
    "forward_from_src_original": True,
    "is_compiling": False,
    "compiling_flag": False,
    "exporting_flag": False,
    "stance": "default",
    "compile_lock_owner": None,
    "current_meta": (),
    "preserve_node_meta": False,
    "pre_dispatch_modes": 0,
    "cuda_set_rng_state_original": True,
}


def not_at_rest(now: Snapshot) -> tuple[Difference, ...]:
    """State that is never right once all threads are idle, whatever it was before; empty when quiet."""
    return tuple(
        Difference(name, str(rest), str(getattr(now, name)))
        for name, rest in AT_REST.items()
        if getattr(now, name) != rest
    )


def differences(before: Snapshot, after: Snapshot, ignore: frozenset[str] = frozenset()) -> tuple[Difference, ...]:
    """Fields that changed, settings one by one (`config.<name>`); pass RANDOM_FIELDS to allow random draws between."""
    unknown = ignore - {field.name for field in fields(Snapshot)}
    assert not unknown, f"no such snapshot fields: {sorted(unknown)}"
    changed: list[Difference] = []
    for field in fields(Snapshot):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name in ignore or old == new:
            continue
        if field.name == "config":
            changed += _changed_settings(dict(old), dict(new))
        else:
            changed.append(Difference(field.name, str(old), str(new)))
    return tuple(changed)


def cuda_set_rng_state_is_original() -> bool:
    """Whether `torch.cuda.set_rng_state` is the real one; AOT metadata collection makes it a no-op for all threads."""
    return torch.cuda.set_rng_state is torch.cuda.random.set_rng_state


def _changed_settings(old: dict[str, str], new: dict[str, str]) -> list[Difference]:
    names = sorted(old.keys() | new.keys())
    return [
        Difference(f"config.{name}", old.get(name, "default"), new.get(name, "default"))
        for name in names
        if old.get(name) != new.get(name)
    ]


def _rng_digests() -> tuple[str, str, str, str]:
    """Short digests of torch's CPU and CUDA, Python's and numpy's global generators."""
    torch_rng = _digest(torch.random.get_rng_state().numpy().tobytes())
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    cuda_states = torch.cuda.get_rng_state_all() if initialized() else []
    cuda_rng = _digest(b"".join(state.numpy().tobytes() for state in cuda_states)) if cuda_states else ""
    numpy_random = sys.modules.get("numpy.random")
    numpy_rng = _digest(pickle.dumps(numpy_random.get_state())) if numpy_random is not None else ""
    return torch_rng, cuda_rng, _digest(repr(random.getstate()).encode()), numpy_rng


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
