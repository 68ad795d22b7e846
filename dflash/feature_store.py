"""Features kept on disk by document: safetensors shards that describe themselves, written whole or not at all."""

import hashlib
import json
import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dflash.durable import PARTIAL, output_errors, write_durably
from dflash.errors import DataError
from dflash.features import Features

if TYPE_CHECKING:
    from dflash.target import Target

FORMAT, META = 1, "meta.json"
SHARD_BYTES = 64 << 20
STALE_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """Where a document's features are, which tokens they were made from, and a checksum of their bytes."""

    shard: str
    ids_hash: str
    crc: int


class FeatureStore:
    """Features by document id. Attributes: directory, layer_ids, dtype; `len` and `in` count documents.

    `put` buffers up to `shard_bytes` and writes a shard; what is buffered when the process dies is computed again.
    One store may be written by several threads, and by several processes.
    """

    def __init__(
        self,
        directory: Path,
        target_fingerprint: str,
        layer_ids: Sequence[int],
        dtype: torch.dtype,
        vocab_size: int,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Opens or creates the store; DataError when it was made by another target, for other layers, or is damaged."""
        self.directory, self.layer_ids, self.dtype = directory, list(layer_ids), dtype
        self._shard_bytes = shard_bytes
        self._lock = threading.RLock()
        self._buffer: dict[int, tuple[str, Features]] = {}
        self._buffered_bytes = 0
        self._entries: dict[int, Entry] = {}
        key = {
            "format": FORMAT,
            "vocab_size": vocab_size,
            "layer_ids": self.layer_ids,
            "dtype": str(dtype).removeprefix("torch."),
            "target": target_fingerprint,
        }
        self._open(key)

    @classmethod
    def for_target(cls, directory: Path, target: "Target", layer_ids: Sequence[int]) -> "FeatureStore":
        """The store of `target`'s features for `layer_ids`."""
        return cls(directory, target.fingerprint, layer_ids, target.dtype, target.vocab_size)

    @classmethod
    def check(cls, directory: Path, target: "Target", layer_ids: Sequence[int]) -> None:
        """DataError unless `directory` is a filled store for `target` and `layer_ids`; writes nothing."""
        if not (directory / META).is_file():
            remedy = "fill it first with --data.features cache"
            raise DataError("a feature store", "none", remedy, where=str(directory))
        if not len(cls.for_target(directory, target, layer_ids)):
            raise DataError("a filled feature store", "an empty one", "use --data.features cache", where=str(directory))

    def put(self, document_id: int, ids_hash: str, features: Features) -> None:
        """Adds a document's hidden [T, L, H] and last [T, H]; the first ones put stay. OutputError: disk full."""
        with self._lock:
            if self.has(document_id, ids_hash):
                return
            kept = Features(*(x.detach().to("cpu", copy=True).contiguous() for x in (features.hidden, features.last)))
            assert kept.hidden.dtype == kept.last.dtype == self.dtype
            assert kept.hidden.shape[1] == len(self.layer_ids)
            self._buffer[document_id] = (ids_hash, kept)
            self._buffered_bytes += kept.hidden.nbytes + kept.last.nbytes
            if self._buffered_bytes >= self._shard_bytes:
                self.flush()

    def get(self, document_id: int, ids_hash: str) -> Features:
        """A document's features, on the CPU; DataError when missing, made from other tokens, or damaged."""
        with self._lock:
            if not self.has(document_id, ids_hash):
                raise DataError(
                    f"features of document {document_id}", "none in the store",
                    "fill it first with --data.features cache", where=str(self.directory),
                )
            if document_id in self._buffer:
                return self._buffer[document_id][1]
            entry = self._entries[document_id]
        return self._read(document_id, entry)

    def has(self, document_id: int, ids_hash: str) -> bool:
        """Whether the document is here; DataError when it is, but with other tokens."""
        with self._lock:
            buffered, entry = self._buffer.get(document_id), self._entries.get(document_id)
        known = buffered[0] if buffered else entry.ids_hash if entry else None
        if known is not None and known != ids_hash:
            raise DataError(
                f"features of the tokens of document {document_id}", "features of other tokens",
                "the data, tokenizer or template changed: use another feature store", where=str(self.directory),
            )
        return known is not None

    def flush(self) -> None:
        """Writes what is buffered as one shard."""
        with self._lock:
            if not self._buffer:
                return
            name = f"shard-{len(self._entries):08d}-{secrets.token_hex(4)}.safetensors"
            tensors: dict[str, Tensor] = {}
            entries: dict[int, Entry] = {}
            for document_id, (ids_hash, features) in self._buffer.items():
                tensors[f"{document_id}.hidden"], tensors[f"{document_id}.last"] = features.hidden, features.last
                entries[document_id] = Entry(name, ids_hash, _crc(features))
            index = {str(i): [entry.ids_hash, entry.crc] for i, entry in entries.items()}
            write_durably(self.directory / name, save(tensors, {"documents": json.dumps(index)}))
            self._entries.update(entries)
            self._buffer.clear()
            self._buffered_bytes = 0

    def __len__(self) -> int:
        return len(self._entries.keys() | self._buffer.keys())

    def __enter__(self) -> "FeatureStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()

    def _open(self, key: dict[str, Any]) -> None:
        meta = self.directory / META
        if meta.exists():
            _check_meta(meta, key)
        else:
            if self.directory.is_dir() and any(self.directory.glob("*.safetensors")):
                raise DataError("a feature store", "shards without meta.json", "use another directory", where=str(meta))
            with output_errors(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            write_durably(meta, (json.dumps(key, indent=1) + "\n").encode())
        _remove_stale(self.directory)
        for shard in sorted(self.directory.glob("shard-*.safetensors")):
            self._entries.update(_index(shard))

    def _read(self, document_id: int, entry: Entry) -> Features:
        path = self.directory / entry.shard
        try:
            with safe_open(path, "pt") as shard:
                features = Features(shard.get_tensor(f"{document_id}.hidden"), shard.get_tensor(f"{document_id}.last"))
        except (OSError, SafetensorError) as error:
            raise _damaged(path, str(error)) from error
        if _crc(features) != entry.crc:
            raise _damaged(path, f"a wrong checksum of document {document_id}")
        return features


def ids_hash(input_ids: Tensor) -> str:
    """sha256 of a document's tokens [T]: features belong to tokens, not to a place in a file."""
    return hashlib.sha256(input_ids.to("cpu", torch.int64).contiguous().numpy().tobytes()).hexdigest()


def _crc(features: Features) -> int:
    value = 0
    for tensor in (features.hidden, features.last):
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, value)
    return value


def _check_meta(meta: Path, key: dict[str, Any]) -> None:
    try:
        found = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError("a readable meta.json", str(error), "use another feature store", where=str(meta)) from error
    for name, expected in key.items():
        got = found.get(name) if isinstance(found, dict) else None
        if got != expected:
            raise DataError(
                f"a feature store with {name} {_short(expected)}", _short(got),
                "use another directory, or the target and layers it was made with", where=str(meta.parent),
            )


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 20 else str(value)


def _index(shard: Path) -> dict[int, Entry]:
    try:
        with safe_open(shard, "pt") as opened:
            documents = json.loads((opened.metadata() or {})["documents"])
        return {int(i): Entry(shard.name, found[0], found[1]) for i, found in documents.items()}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(shard, str(error)) from error


def _damaged(path: Path, got: str) -> DataError:
    return DataError("a whole feature shard", got, "delete this file: it will be computed again", where=str(path))


def _remove_stale(directory: Path) -> None:
    """Deletes what a killed writer left; a file that a live one is writing is younger than this."""
    for partial in directory.glob(f"{PARTIAL}*"):
        if time.time() - partial.stat().st_mtime > STALE_S:
            partial.unlink(missing_ok=True)
