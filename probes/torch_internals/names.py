"""The table of private torch names, and the only ways to reach, read and replace them.

Nothing else in this repository spells a private torch name. A name that the installed torch does not have raises
`UnsupportedTorch`; nothing is skipped. Add a row here, then an accessor in the file that fits.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Release = tuple[int, int]

OLDEST: Release = (2, 11)
NEWEST: Release = (2, 15)


class UnsupportedTorch(RuntimeError):
    """A torch name that this repository needs is not in the installed torch."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        supported = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        super().__init__(
            f"torch {version} has no {name}: expected it in torch {supported}; "
            "install a supported torch or add the new name to probes/torch_internals/names.py"
        )

    def __reduce__(self) -> tuple[type[UnsupportedTorch], tuple[str, str]]:
        return UnsupportedTorch, (self.name, self.version)


def torch_release() -> Release:
    """Major and minor version of the installed torch; UnsupportedTorch outside 2.11 to 2.15."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise UnsupportedTorch("supported release", torch.__version__)
    return major, minor


@dataclass(frozen=True)
class PrivateName:
    """Where one name lives: module, dotted path inside it, and the first and last torch release that has it."""

    module: str
    path: str
    first: Release = OLDEST
    last: Release = NEWEST

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.path}"


_FX = "torch.fx._symbolic_trace"
_EVAL_FRAME = "torch._dynamo.eval_frame"
_CONVERT = "torch._dynamo.convert_frame"

NAMES: dict[str, PrivateName] = {
    # FX tracing: the flag (a module global up to 2.13, a thread-local from 2.14), the patches, the traces
    "fx.flag": PrivateName(_FX, "_is_fx_tracing_flag", last=(2, 13)),
    "fx.get_flag": PrivateName(_FX, "_get_is_fx_tracing", first=(2, 14)),
    "fx.set_flag": PrivateName(_FX, "_set_is_fx_tracing", first=(2, 14)),
    "fx.is_symbolic_tracing": PrivateName(_FX, "is_fx_symbolic_tracing"),
    "fx.is_tracing": PrivateName(_FX, "is_fx_tracing"),
    "fx.current_patcher": PrivateName(_FX, "CURRENT_PATCHER"),
    "fx.new_patcher": PrivateName(_FX, "_new_patcher"),
    "fx.patch_method": PrivateName(_FX, "_Patcher.patch_method"),
    "fx.revert_patches": PrivateName(_FX, "_maybe_revert_all_patches"),
    "fx.module_call": PrivateName(_FX, "_orig_module_call"),
    "fx.module_getattr": PrivateName(_FX, "_orig_module_getattr"),
    "fx.trace": PrivateName(_FX, "Tracer.trace"),
    "fx.make_fx": PrivateName("torch.fx.experimental.proxy_tensor", "make_fx"),
    "fx.make_fx_trace": PrivateName("torch.fx.experimental.proxy_tensor", "_MakefxTracer.trace"),
    "fx.current_meta": PrivateName("torch.fx.traceback", "current_meta"),
    "fx.preserve_node_meta": PrivateName("torch.fx.traceback", "should_preserve_node_meta"),
    "fx.annotate": PrivateName("torch.fx.traceback", "annotate"),
    "fx.traceback_copy": PrivateName("torch.fx.traceback", "copy"),
    "fx.force_recompile": PrivateName("torch.fx._lazy_graph_module", "_LazyGraphModule.force_recompile"),
    "fx.forward_from_src": PrivateName("torch.fx.graph_module", "_forward_from_src"),
    # eager higher-order operators (uncompiled flex_attention, cond, while_loop, ...)
    "hop.set_env": PrivateName("torch._higher_order_ops.utils", "_set_compilation_env"),
    "hop.setup_env": PrivateName("torch._higher_order_ops.utils", "setup_compilation_env"),
    # what the compiler says about itself
    "compiler.compiling_flag": PrivateName("torch.compiler", "_is_compiling_flag"),
    "compiler.exporting_flag": PrivateName("torch.compiler", "_is_exporting_flag"),
    "compiler.is_compiling": PrivateName("torch.compiler", "is_compiling"),
    "compiler.is_exporting": PrivateName("torch.compiler", "is_exporting"),
    "export.session": PrivateName("torch._export.utils", "_compiling_state_context"),
    "compiler.session": PrivateName("torch.compiler", "_compile_session_context", first=(2, 13)),
    # dynamo
    "dynamo.lock": PrivateName(_CONVERT, "compile_lock"),
    "dynamo.trace_frame": PrivateName(_CONVERT, "trace_frame"),
    "dynamo.compile_frame": PrivateName(_CONVERT, "_compile"),
    "dynamo.stance": PrivateName(_EVAL_FRAME, "_stance"),
    "dynamo.wrap": PrivateName(_EVAL_FRAME, "_TorchDynamoContext.__call__"),
    "dynamo.patch_torch": PrivateName(_EVAL_FRAME, "TorchPatcher.patch"),
    "dynamo.set_stance": PrivateName(_EVAL_FRAME, "_set_stance"),
    "dynamo.call_backend": PrivateName("torch._dynamo.output_graph", "OutputGraph.call_user_compiler"),
    "dynamo.event_start": PrivateName("torch._dynamo.utils", "ChromiumEventLogger.log_event_start"),
    "dynamo.event_end": PrivateName("torch._dynamo.utils", "ChromiumEventLogger.log_event_end"),
    "dynamo.metrics": PrivateName("torch._dynamo.utils", "get_compilation_metrics"),
    "dynamo.counters": PrivateName("torch._dynamo.utils", "counters"),
    "dynamo.config": PrivateName("torch._dynamo", "config"),
    "inductor.lowerings": PrivateName("torch._inductor.lowering", "lowerings"),
    "inductor.fallbacks": PrivateName("torch._inductor.lowering", "fallbacks"),
    "inductor.cache_dir": PrivateName("torch._inductor.runtime.cache_dir_utils", "cache_dir"),
    "inductor.compile_fx": PrivateName("torch._inductor.compile_fx", "compile_fx"),
    "inductor.post_compile": PrivateName("torch._inductor.output_code", "CompiledFxGraph.post_compile"),
    "inductor.run_compiled": PrivateName("torch._inductor.output_code", "CompiledFxGraph.__call__"),
    "inductor.config": PrivateName("torch._inductor", "config"),
    "functorch.config": PrivateName("torch._functorch", "config"),
    "config.install": PrivateName("torch.utils._config_module", "ConfigModule"),
    "aot.function": PrivateName("torch._functorch.aot_autograd", "aot_function"),
    "aot.track_backward": PrivateName("torch._functorch._aot_autograd.runtime_wrappers", "track_graph_compiling"),
    "dynamo.skip_code": PrivateName(_EVAL_FRAME, "skip_code"),
    "dynamo.set_eval_frame": PrivateName(_EVAL_FRAME, "_maybe_set_eval_frame"),
    # flex attention
    "flex.validate_device": PrivateName("torch.nn.attention.flex_attention", "_validate_device"),
    "flex.dense_to_ordered": PrivateName("torch.nn.attention.flex_attention", "_dense_to_ordered"),
    # objects that autograd hands on to its own threads
    "tls.stash": PrivateName("torch._C", "_stash_obj_in_tls"),
    "tls.get": PrivateName("torch._C", "_get_obj_in_tls"),
    "tls.has": PrivateName("torch._C", "_is_key_in_tls"),
    # dispatch modes used while tracing before dispatch: one stack for the process
    "ops.pre_dispatch_modes": PrivateName("torch._ops", "_mode_stack_state_for_pre_dispatch"),
}


def available(key: str) -> bool:
    """Whether the table says that the installed torch has this name (it does not look)."""
    entry = NAMES[key]
    return entry.first <= torch_release() <= entry.last


def loaded(key: str) -> bool:
    """Whether the module of this name was imported already: reading must not import dynamo as a side effect."""
    return NAMES[key].module in sys.modules


def site(key: str) -> tuple[Any, str]:
    """The object that holds a private name, and the attribute: what `setattr` needs to replace it."""
    entry = NAMES[key]
    if not available(key):
        raise UnsupportedTorch(entry.dotted, torch.__version__)
    try:
        holder: Any = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        raise UnsupportedTorch(entry.dotted, torch.__version__) from error
    *parents, attribute = entry.path.split(".")
    for parent in parents:
        if not hasattr(holder, parent):
            raise UnsupportedTorch(entry.dotted, torch.__version__)
        holder = getattr(holder, parent)
    if not hasattr(holder, attribute):
        raise UnsupportedTorch(entry.dotted, torch.__version__)
    return holder, attribute


def resolve(key: str) -> Any:
    """The present value of a private name; UnsupportedTorch when this torch lacks it, KeyError for an unknown key."""
    holder, attribute = site(key)
    return getattr(holder, attribute)


def assign(key: str, value: Any) -> None:
    """Set a private name, for the whole process. Prefer `replaced`, which restores it."""
    holder, attribute = site(key)
    setattr(holder, attribute, value)


@contextmanager
def replaced(key: str, value: Any) -> Iterator[Any]:
    """Replace a private name for the whole process; yields the previous value and restores it in any case.

    Reaches only code that looks the name up in its module at each call: copies bound earlier keep the old object.
    """
    holder, attribute = site(key)
    previous = getattr(holder, attribute)
    setattr(holder, attribute, value)
    try:
        yield previous
    finally:
        setattr(holder, attribute, previous)


def missing_names() -> tuple[str, ...]:
    """Names that the table promises for the installed torch and that are not there; imports dynamo and inductor."""
    missing = []
    for key, entry in NAMES.items():
        if not available(key):
            continue
        try:
            site(key)
        except UnsupportedTorch:
            missing.append(entry.dotted)
    return tuple(missing)
