"""One Python object a thread that follows its work into autograd's own threads, as grad mode and autocast do."""

from __future__ import annotations

import ctypes
from typing import Any

from probes.torch_internals.names import resolve, torch_release


def stash(key: str, value: Any) -> None:
    """Set this thread's object under `key`; a backward started from here sees it in whatever thread runs its nodes."""
    if torch_release() < (2, 12):  # it takes no reference of its own: measured, each call costs the object one
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    resolve("tls.stash")(key, value)


def stashed(key: str) -> Any:
    """This thread's object under `key`, or that of the thread it works for; None when there is none."""
    return resolve("tls.get")(key) if resolve("tls.has")(key) else None
