"""Reads one thread's stack: what it is doing, which locks it holds, what it waits for.

Locks are found in the source: a frame inside the body of `with LOCK:` holds LOCK, and a thread whose innermost frame
stands on the `with` line itself waits for it. So a lock taken by a bare `acquire()` is seen only while waited for.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.stack_sources import Frame, Thread

_LOCKLIKE = re.compile(r"lock|mutex|gate|sem(aphore)?$", re.IGNORECASE)
_QUEUE_CALL = re.compile(r"\.(get|put)\(")
_ACQUIRE = re.compile(r"([\w.]+)\.acquire\(")
_LOCK_METHODS = frozenset({"__enter__", "acquire", "acquire_lock"})


@dataclass(frozen=True)
class Reading:
    """One thread understood. `waits` is a lock's name, "queue", "autograd engine", "thread", "condition" or None.

    `compile_of` names the function being compiled while a compile is in progress in this thread.
    """

    thread: Thread
    activity: str
    holds: tuple[str, ...]
    waits: str | None
    in_engine: bool
    compile_of: str | None
    where: str


@dataclass(frozen=True)
class LockRegion:
    """One `with LOCK:` in a source file: the lock's name, the lines of the header and the last line of the body."""

    lock: str
    first: int
    last_header: int
    end: int


def read_thread(thread: Thread) -> Reading:
    """Classify one thread from its Python frames."""
    frames = thread.frames
    waits = _waits_for(frames)
    holds = _held(frames, waits)
    compile_of = _compiled_function(frames, waits)
    activity = _activity(frames, waits, compile_of)
    return Reading(thread, activity, holds, waits, _runs_in_engine(frames), compile_of, _where(frames))


@functools.lru_cache(maxsize=512)
def lock_regions(file: str) -> tuple[LockRegion, ...]:
    """All `with` statements over lock-like names in a source file; none when the file cannot be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(
        LockRegion(name, node.lineno, item.context_expr.end_lineno or node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if (name := _lock_name(item.context_expr)) is not None
    )


def _lock_name(expression: ast.expr) -> str | None:
    """`a.b.my_lock` -> "my_lock"; None when the expression is not a name that looks like a lock."""
    name = expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", None)
    return name if name is not None and _LOCKLIKE.search(name) else None


def _waits_for(frames: Sequence[Frame]) -> str | None:
    if not frames:
        return None
    lock = _lock_waited_for(frames)
    if lock is not None:
        return lock
    inner = frames[0]
    if inner.file.endswith("queue.py") or any(f.file.endswith("/queue.py") for f in frames[:3]):
        return "queue"
    if _is(inner, "autograd/graph.py", "_engine_run_backward"):
        return "autograd engine"
    if inner.file.endswith("threading.py"):
        joining = any(f.function.split(".")[-1] in ("join", "_shutdown", "_wait_for_tstate_lock") for f in frames[:2])
        return "thread" if joining else "condition"
    line = linecache.getline(inner.file, inner.line)
    if _QUEUE_CALL.search(line) and re.search(r"queue|\bq\b|_q\b", line, re.IGNORECASE):
        return "queue"
    return None


def _lock_waited_for(frames: Sequence[Frame]) -> str | None:
    """The lock the innermost frame is blocked on; a Python-level `__enter__` or `acquire` stands for its caller."""
    depth = 0
    while depth + 1 < len(frames) and _is_lock_method(frames[depth]):
        depth += 1
    frame = frames[depth]
    for region in lock_regions(frame.file):
        if region.first <= frame.line <= region.last_header:
            return region.lock
    match = _ACQUIRE.search(linecache.getline(frame.file, frame.line))
    if match is None:
        return None
    name = match[1].split(".")[-1]
    # threading's own condition variables wait on an inner lock; they are no lock of the program
    return None if frame.file.endswith("threading.py") else name


def _is_lock_method(frame: Frame) -> bool:
    return frame.function.split(".")[-1] in _LOCK_METHODS


def _held(frames: Sequence[Frame], waits: str | None) -> tuple[str, ...]:
    """Locks whose `with` body some frame is inside, outermost first, without the one being waited for."""
    held: list[str] = []
    for frame in reversed(frames):
        for region in lock_regions(frame.file):
            inside = region.last_header < frame.line <= region.end
            if inside and region.lock != waits and region.lock not in held:
                held.append(region.lock)
    return tuple(held)


def _is(frame: Frame, file_end: str, function: str) -> bool:
    return frame.file.endswith(file_end) and frame.function.split(".")[-1] == function


def _runs_in_engine(frames: Sequence[Frame]) -> bool:
    """Whether autograd called this stack: an engine thread's outermost Python frame, or backward on its own thread."""
    return any(frame.file.endswith("autograd/function.py") and "apply" in frame.function for frame in frames)


def _compiled_function(frames: Sequence[Frame], waits: str | None) -> str | None:
    """The user function a compile in this thread is for, as "name (file:line)"; None when none is in progress."""
    if waits == "compile_lock":
        return None
    for depth, frame in enumerate(frames):
        if _is(frame, "_inductor/compile_fx.py", "compile_fx_backward") or (
            frame.file.endswith("_inductor/compile_fx.py") and "bw_compiler" in frame.function
        ):
            return "a lazy backward"
        if _is(frame, "_dynamo/convert_frame.py", "_compile"):
            user = next((f for f in frames[depth:] if "/torch/_dynamo/" not in f.file), None)
            return f"a frame called from {_short(user)}" if user is not None else "a frame"
    return None


_PHASES = (("/triton/", "triton"), ("/_inductor/", "inductor"), ("/_functorch/", "AOT"), ("/_dynamo/", "dynamo"))


def _activity(frames: Sequence[Frame], waits: str | None, compile_of: str | None) -> str:
    if any(f.file.endswith("concurrent/futures/thread.py") for f in frames[:1]) or _is_torch_helper(frames):
        return "idle pool worker"
    if waits is not None:
        return f"waiting for {waits}"
    if compile_of is not None:
        phase = next((name for f in frames for part, name in _PHASES if part in f.file), "dynamo")
        return f"compiling: {phase}"
    if any(_is(f, "fx/_symbolic_trace.py", "trace") for f in frames):
        return "FX trace"
    if _runs_in_engine(frames):
        return "autograd engine"
    if any("/torchinductor_" in f.file or _is(f, "_dynamo/eval_frame.py", "compile_wrapper") for f in frames):
        return "compiled call"
    return "user code" if frames else "native code"


def _is_torch_helper(frames: Sequence[Frame]) -> bool:
    """Threads of the standard library or torch that wait for work by design."""
    outer = [f.file for f in frames if not f.file.endswith("threading.py")]
    helpers = ("/_inductor/compile_worker/", "/concurrent/futures/", "/tqdm/_monitor.py", "/multiprocessing/")
    return bool(outer) and all(any(part in file for part in helpers) for file in outer)


def _short(frame: Frame) -> str:
    return f"{frame.function} ({Path(frame.file).name}:{frame.line})"


def _where(frames: Sequence[Frame]) -> str:
    """The innermost frame outside torch and the standard library's threading, or the innermost one."""
    own = [f for f in frames if not re.search(r"/torch/|/threading\.py|/queue\.py|^<", f.file)]
    chosen = own[0] if own else (frames[0] if frames else None)
    return _short(chosen) if chosen is not None else ""
