"""What the calling thread sees of torch's compile settings: values that differ from their defaults, by full name."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch

from probes.torch_internals.names import UnsupportedTorch, resolve, torch_release

CONFIG_MODULES = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
_MISSING = object()


def config_is_per_context() -> bool:
    """Whether settings are context variables (2.12 on, so a new thread sees defaults) or process globals (2.11)."""
    return torch_release() >= (2, 12)


def dynamo_config() -> Any:
    """The dynamo settings object (imports dynamo)."""
    return resolve("dynamo.config")


def inductor_config() -> Any:
    """The inductor settings object (imports inductor)."""
    return resolve("inductor.config")


def functorch_config() -> Any:
    """The functorch settings object (imports functorch's settings)."""
    return resolve("functorch.config")


def config_overrides() -> dict[str, str]:
    """Settings of dynamo, inductor and functorch set in code to something else than the default, as seen here.

    Keys are full names (`torch._dynamo.config.recompile_limit`), values their repr. Modules that nobody imported have
    none. Reading does not write (plain attribute access copies mutable defaults into the override).
    """
    seen: dict[str, str] = {}
    for module_name in CONFIG_MODULES:
        module = sys.modules.get(module_name)
        if module is None:
            continue
        for name, entry in _entries(module).items():
            value = _override(entry)
            if value is not _MISSING and value != entry.default:
                seen[f"{module_name}.{name}"] = repr(value)
    return seen


def config_default(full_name: str) -> str:
    """The repr of a setting's built-in default; KeyError when there is no such setting."""
    module_name, _, name = full_name.partition(".config.")
    module_name += ".config"
    return repr(_entries(sys.modules[module_name])[name].default)


def _entries(module: Any) -> dict[str, Any]:
    entries = getattr(module, "_config", None)
    if not isinstance(entries, dict):
        raise UnsupportedTorch(f"{module.__name__}._config", torch.__version__)
    return entries


def _override(entry: Any) -> Any:
    """The value set in code, or _MISSING; a ContextVar from 2.12, the value itself in 2.11."""
    if not hasattr(entry, "user_override"):
        raise UnsupportedTorch("torch.utils._config_module._ConfigEntry.user_override", torch.__version__)
    value = entry.user_override
    if isinstance(value, ContextVar):
        value = value.get()
    # torch marks "never set" with a bare object()
    return _MISSING if type(value) is object else value
