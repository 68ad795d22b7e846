"""metrics.jsonl: one JSON object a step or event, cut back to the checkpoint when a run is resumed."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash.errors import OutputError
from dflash.run_directory import replace_text


class MetricsFile:
    """Appends records; each has `step` and `kind` (step, eval, save, skip)."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending."""
        self._path = path
        # unbuffered: a record is seen at once, and nothing is left over to fail when the file is closed
        self._stream = path.open("ab", buffering=0)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One line, visible to readers at once. OutputError when the disk is full."""
        line = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        left = memoryview(line.encode())
        try:
            while left:
                left = left[self._stream.write(left) :]
        except OSError as error:
            remedy = "make room, then go on with --resume"
            got = error.strerror or str(error)
            raise OutputError("room for metrics", got, remedy, where=str(self._path)) from error

    def sync(self) -> None:
        """To the disk, before the checkpoint that counts on it."""
        os.fsync(self._stream.fileno())


def cut_after(path: Path, step: int) -> None:
    """Drops the records of later steps, and a last line that was not finished; atomic."""
    if path.exists():
        kept = [json.dumps(record) for record in read(path) if record["step"] <= step]
        replace_text(path, "".join(f"{line}\n" for line in kept))


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a metrics file, of one kind or all; a line that is not a whole record is left out."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # only a kill in the middle of a write leaves one, and its step comes again
        if not isinstance(record, dict) or not isinstance(record.get("step"), int) or "kind" not in record:
            continue  # nobody but a person writes these
        if kind is None or record["kind"] == kind:
            records.append(record)
    return records
