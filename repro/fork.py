"""The result of a function in a forked copy of this process: torch is imported once, leaked state dies there."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def in_fork(work: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Run `work` in a fork and return what it returns (picklable); RuntimeError if it raised, TimeoutError if it hung.

    Call it while this process has one thread: a fork copies only the calling thread.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(work, writer)
    os.close(writer)
    try:
        return _answer(reader, limit_s)
    finally:
        os.close(reader)
        # the answer is complete or will never come: threads that a deadlock left behind must not outlive it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(work: Callable[[], Any], writer: int) -> None:
    try:
        payload = pickle.dumps((True, work()))
    except BaseException:  # noqa: BLE001 - carried to the parent, which raises
        payload = pickle.dumps((False, traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(payload)
    os._exit(0)


def _answer(reader: int, limit_s: float) -> Any:
    chunks: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], limit_s)
        if not ready:
            raise TimeoutError(f"expected an answer from the fork in {limit_s} s, got none")
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
    if not chunks:
        raise RuntimeError("expected an answer from the fork, got a crash")
    succeeded, value = pickle.loads(b"".join(chunks))
    if not succeeded:
        raise RuntimeError(f"the fork raised:\n{value}")
    return value
