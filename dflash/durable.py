"""Files and directories that appear whole or not at all, whatever kills the process or fills the disk."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import OutputError

PARTIAL = ".partial-"
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_durably(path: Path, data: bytes) -> None:
    """Writes `data` beside `path`, flushes it to disk and renames it into place; OutputError when it cannot."""
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    with output_errors(path):
        try:
            _write_and_sync(partial, data)
            os.rename(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(path.parent)


@contextmanager
def durable_directory(path: Path) -> Iterator[Path]:
    """Yields an empty directory to fill that becomes `path` on success and is deleted on any error.

    OutputError when `path` exists and is not an empty directory, or cannot be written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError("a new directory", "one that is in use", "name another or delete it", where=str(path))
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(4)}-{path.name}")
    with output_errors(path):
        try:
            partial.mkdir(parents=True)
            yield partial
            for file in partial.iterdir():
                _sync(file)
            sync_directory(partial)
            os.rename(partial, path)  # onto an empty directory, if there is one
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_directory(path.parent)


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of writing into an OutputError that names `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        got = "no space left" if full else str(error.strerror or error)
        remedy = "free some space or choose another disk" if full else "check the directory and its permissions"
        raise OutputError("to write here", got, remedy, where=str(path)) from error


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory survive a power cut."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_and_sync(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
