"""Programs for compiled_calls and compile_trace, each with a fault and without. Run as a script in a child.

python call_programs.py NAME faulty|clean
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention

from probes import compile_trace, compiled_calls
from probes.command_line import as_plain

inside, leave = threading.Event(), threading.Event()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def warm() -> Callable[[torch.Tensor], torch.Tensor]:
    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    return compiled


@contextmanager
def other_thread(body: Callable[[], Any], faulty: bool) -> Any:
    """The block runs while T1 stands in the middle of `body` (faulty) or after it is through (clean)."""
    thread = threading.Thread(target=body, name="T1")
    if not faulty:
        leave.set()
    thread.start()
    assert inside.wait(60)
    if not faulty:
        thread.join()
    try:
        yield
    finally:
        leave.set()
        thread.join()


def stop(x: Any) -> Any:
    inside.set()
    leave.wait(60)
    return x + 1


def stopping_backend(graph: Any, inputs: Any) -> Any:
    stop(1)
    return graph.forward


def trace(faulty: bool) -> None:
    """A warm call beside another thread's make_fx: raises up to torch 2.13."""
    compiled = warm()
    with other_thread(lambda: make_fx(stop)(torch.ones(2)), faulty):
        try:
            print(compiled(torch.ones(2)).sum().item())
        except RuntimeError as error:
            print("raised", str(error)[:20])


def silent(faulty: bool) -> None:
    """The same with the check made silent: the worst cure."""
    compiled = warm()
    body = lambda: make_fx(stop)(torch.ones(2))  # noqa: E731
    with other_thread(body, faulty), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        print(compiled(torch.ones(2)).sum().item())


def stance(faulty: bool) -> None:
    def body() -> None:
        with torch.compiler.set_stance("force_eager"):
            stop(1)

    compiled = warm()
    with other_thread(body, faulty):
        print(compiled(torch.ones(2)).sum().item())


def limit(faulty: bool) -> None:
    """More shapes than dynamo recompiles for: the rest run uncompiled."""
    torch._dynamo.config.recompile_limit = 2
    compiled = warm()
    for size in range(3, 8 if faulty else 4):
        compiled(torch.ones(size))
    print("done")


def suppressed(faulty: bool) -> None:
    torch._dynamo.config.suppress_errors = True

    def backend(graph: Any, inputs: Any) -> Any:
        if faulty:
            raise ValueError("a broken backend")
        return graph.forward

    print(torch.compile(double, backend=backend)(torch.ones(2)).sum().item())


def branch(faulty: bool) -> None:
    """User code that asks is_compiling() beside another thread's compile (process-wide from torch 2.13)."""
    with other_thread(lambda: torch.compile(double, backend=stopping_backend)(torch.ones(2)), faulty):
        print("other path" if torch.compiler.is_compiling() else "plain path")


def export(faulty: bool) -> None:
    """torch.compile beside another thread's export hands the function back."""

    class Stops(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return stop(x)

    with other_thread(lambda: torch.export.export(Stops(), (torch.ones(2),), strict=False), faulty):
        print(torch.compile(double, backend="eager")(torch.ones(2)).sum().item())


def annotation(faulty: bool) -> None:
    """A compile beside another thread's annotation for eager fallbacks."""
    if "fallback_to_eager" not in inspect.getsource(flex_attention):
        print("done")
        return

    def body() -> None:
        with torch.fx.traceback.annotate({"fallback_to_eager": True}):
            stop(1)

    with other_thread(body, faulty):
        torch.compile(double, backend="eager")(torch.ones(2))
    print("done")


def lock(faulty: bool) -> None:
    """A second compile waits for the first one's lock."""

    def body() -> None:
        torch.compile(double, backend=stopping_backend)(torch.ones(2))

    with other_thread(body, faulty):
        if faulty:
            threading.Timer(0.3, leave.set).start()
        torch.compile(lambda x: x + 3, backend="aot_eager")(torch.ones(2))
    print("done")


PROGRAMS = {f.__name__: f for f in (trace, silent, stance, limit, suppressed, branch, export, lock, annotation)}


PROBES: dict[str, Any] = {"alone": contextlib.nullcontext, "calls": compiled_calls.watch, "trace": compile_trace.trace}


def trace_events(tracing: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        tracing.write(path)
        return json.loads(path.read_text())["traceEvents"]


def run_all(mode: str, watched: str) -> None:
    """Run every program by itself; one JSON line each: its name, what it printed, and what the probe saw, if any."""
    for name, body in PROGRAMS.items():
        torch._dynamo.reset()
        inside.clear()
        leave.clear()
        printed, report = io.StringIO(), None
        with torch._dynamo.config.patch(recompile_limit=8, suppress_errors=False), contextlib.redirect_stdout(printed):
            with PROBES[watched]() as watching:
                body(mode == "faulty")
            if watching is not None:
                report = as_plain(watching.result) | {"finding": watching.result.finding}
                if watched == "trace":
                    report["events"] = trace_events(watching)
        print(json.dumps({"name": name, "printed": printed.getvalue(), "report": report}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "all":
        run_all(sys.argv[2], sys.argv[3])
    else:
        PROGRAMS[sys.argv[1]](sys.argv[2] == "faulty")
