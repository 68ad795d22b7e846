"""Documents: tokenised conversations with their loss mask, and the Arrow store that keeps them on disk."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value
from numpy.typing import NDArray

from dflash.errors import DataError, OutputError

FORMAT = 1
# documents a record batch: large enough to be fast, small enough that one batch of long documents fits in memory
WRITE_BATCH = 512
DOCUMENTS, USED, META, PARTIAL = "documents.arrow", "used_tokens.npy", "meta.json", ".partial"
# int64 offsets do not occur inside one record batch of WRITE_BATCH documents, so plain lists are enough
FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "length": Value("int32"),
        "source": Value("string"),
    }
)


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised conversation: input_ids [T] int32, loss_mask [T] bool (true: an assistant's token)."""

    id: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    # file:line of the conversation
    source: str = ""

    def __len__(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    @property
    def ids_hash(self) -> str:
        """sha256 of the token ids (little-endian int32), in hex: what a feature store is keyed by."""
        return hashlib.sha256(np.ascontiguousarray(self.input_ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class StoreMeta:
    """What a store was made of and with; the numbers are filled in while writing."""

    # number of token ids the tokenizer knows
    vocab_size: int
    # sha256 of the tokenizer's vocabulary, in hex
    vocab_sha256: str
    # sha256 of the chat template, in hex
    template_sha256: str
    # longest document allowed, in tokens
    row_tokens: int
    # token that fills rows up; it is never attended to nor trained on
    pad_id: int
    # where the loss mask came from: the template's generation blocks, or rendered prefixes
    mask_from: str = "template"
    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    # what became of the conversations: kept, truncated, dropped, ...; read when the store is finished
    counts: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT


class DocumentStore:
    """Tokenised documents behind an Arrow table, memory-mapped when it is on disk: opening reads no document."""

    def __init__(self, dataset: Dataset, meta: StoreMeta, used: NDArray[np.bool_], where: str) -> None:
        """Use `open` or `from_documents`. used [V]: token ids that occur; where: the directory, for messages."""
        self.dataset, self.meta, self.used, self.where = dataset, meta, used, where
        self._table = dataset.with_format("arrow")

    @classmethod
    def from_documents(cls, documents: Iterable[Document], meta: StoreMeta, where: str = "memory") -> "DocumentStore":
        """A store in memory, `where`: what it was read from. Raises DataError when there is no document."""
        tally = _Tally(meta)
        batches = [tally.add(chunk) for chunk in _chunks(documents)]
        table = pa.Table.from_batches(batches, schema=FEATURES.arrow_schema)
        return cls(Dataset(table), tally.meta(where), tally.used, where)

    @classmethod
    def write(cls, directory: Path, documents: Iterable[Document], meta: StoreMeta) -> "DocumentStore":
        """Writes documents as they come into `directory`, whole or not at all, and opens it.

        Files appear under their names only when all are written, meta.json last: a directory without it is no store.
        Whatever goes wrong, what was written is removed again. Raises DataError when there is no document, OutputError
        when the directory cannot be written or the disk is full.
        """
        tally = _Tally(meta)
        with _partial(directory) as partial:
            with (
                pa.OSFile(str(partial / DOCUMENTS), "wb") as sink,
                pa.ipc.new_stream(sink, FEATURES.arrow_schema) as writer,
            ):
                for chunk in _chunks(documents):
                    writer.write_batch(tally.add(chunk))
            np.save(partial / USED, np.packbits(tally.used), allow_pickle=False)
            write_meta(partial, tally.meta(str(directory)))
            # an older store stops being one before its parts change
            (directory / META).unlink(missing_ok=True)
            for name in (DOCUMENTS, USED, META):
                (partial / name).replace(directory / name)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path | str) -> "DocumentStore":
        """Maps a store into memory. Raises DataError when it is missing, incomplete or of another format."""
        directory = Path(directory)
        meta = read_meta(directory)
        try:
            dataset = Dataset.from_file(str(directory / DOCUMENTS))
            used = np.unpackbits(np.load(directory / USED, allow_pickle=False), count=meta.vocab_size).astype(bool)
        except (OSError, ValueError, EOFError, pa.ArrowInvalid) as error:
            raise _broken(directory, f"one that cannot be read ({_first_line(error)})") from error
        if len(dataset) != meta.documents:
            raise _broken(directory, f"{len(dataset)} of {meta.documents} documents")
        return cls(dataset, meta, used, str(directory))

    def __len__(self) -> int:
        """Documents."""
        return int(self.meta.documents)

    def __getitem__(self, index: int) -> Document:
        """Document number `index`, which is also its id."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._table[index]
        return Document(
            id=index,
            input_ids=_flat(row, "input_ids").to_numpy(),
            loss_mask=_flat(row, "loss_mask").to_numpy(zero_copy_only=False),
            source=row["source"][0].as_py(),
        )

    def __iter__(self) -> Iterator[Document]:
        """Every document, in the order of the ids."""
        return (self[index] for index in range(len(self)))

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each document [documents]; read from its own column, not from the documents."""
        values: NDArray[np.int32] = self.dataset.data.column("length").to_numpy()
        return values

    def check_vocabulary(self, vocab_sha256: str, template_sha256: str) -> None:
        """Raises DataError unless the store was made with this vocabulary and chat template."""
        for name, ours, theirs in (
            ("vocabulary", self.meta.vocab_sha256, vocab_sha256),
            ("chat template", self.meta.template_sha256, template_sha256),
        ):
            if ours != theirs:
                raise DataError(
                    f"a store made with the target's {name} (sha256 {theirs[:12]})",
                    f"one made with another (sha256 {ours[:12]})",
                    "run `dflash prepare` again with this target",
                    where=self.where,
                )

    def check_mask_token(self, token_id: int) -> None:
        """Raises DataError when the mask token occurs in the data: the drafter could not tell it from unknown slots."""
        if not 0 <= token_id < self.meta.vocab_size or not self.used[token_id]:
            return
        raise DataError(
            f"a mask token that never occurs in the data (id {token_id})",
            f"a document that has it ({self._source_of(token_id)})",
            "choose another with --drafter.mask-token-id, or delete the conversation",
            where=self.where,
        )

    def _source_of(self, token_id: int) -> str:
        for batch in self.dataset.data.to_batches():
            column = batch.column("input_ids")
            hits = pc.index(column.flatten(), pa.scalar(token_id, pa.int32())).as_py()
            if hits >= 0:
                row = int(np.searchsorted(np.cumsum(batch.column("length").to_numpy()), hits, side="right"))
                return str(batch.column("source")[row].as_py())
        return "its source was not found"


class _Tally:
    """Turns chunks of documents into record batches and counts what goes by."""

    def __init__(self, meta: StoreMeta) -> None:
        self._start, self._documents, self._tokens, self._supervised = meta, 0, 0, 0
        self.used = np.zeros(meta.vocab_size, dtype=bool)

    def add(self, chunk: list[Document]) -> pa.RecordBatch:
        lengths = np.array([len(d) for d in chunk], dtype=np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ids, mask = (np.concatenate([getattr(d, name) for d in chunk]) for name in ("input_ids", "loss_mask"))
        self.used[ids] = True
        self._documents += len(chunk)
        self._tokens += len(ids)
        self._supervised += int(mask.sum())
        arrays = [
            pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32))),
            pa.ListArray.from_arrays(offsets, pa.array(mask.astype(bool))),
            pa.array(lengths),
            pa.array([d.source for d in chunk], pa.string()),
        ]
        return pa.record_batch(arrays, schema=FEATURES.arrow_schema)

    def meta(self, where: str) -> StoreMeta:
        if self._documents == 0:
            left_out = ", ".join(f"{n} {name}" for name, n in self._start.counts.items() if n) or "none"
            remedy = "raise row_tokens, or give conversations with answers"
            raise DataError("at least one document to train on", left_out, remedy, where=where)
        return replace(
            self._start,
            documents=self._documents,
            tokens=self._tokens,
            supervised_tokens=self._supervised,
            counts=dict(self._start.counts),
        )


def write_meta(directory: Path, meta: StoreMeta) -> None:
    """Writes meta.json; moved into place last, it makes a directory a store."""
    (directory / META).write_text(json.dumps(asdict(meta), indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _partial(directory: Path) -> Iterator[Path]:
    """A work directory inside `directory`, gone at the end; on failure so is `directory`, if it was made here."""
    made, finished = not directory.exists(), False
    partial = directory / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        finished = True
    except OSError as error:
        got, remedy = str(error.strerror or error), "free some space, or choose another directory"
        raise OutputError("a directory that takes the store", got, remedy, where=str(directory)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made and not finished and directory.is_dir():
            directory.rmdir()


def read_meta(directory: Path) -> StoreMeta:
    """Reads meta.json. Raises DataError when it is missing, damaged or of another format."""
    try:
        values = json.loads((directory / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _broken(directory, f"no {META}") from None
    except (OSError, ValueError) as error:
        raise _broken(directory, f"a damaged {META} ({_first_line(error)})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _broken(directory, f"a {META} of another format than {FORMAT}")
    if set(values) != {f.name for f in fields(StoreMeta)}:
        raise _broken(directory, f"a {META} with other keys than this version writes")
    return StoreMeta(**values)


def is_store(path: Path) -> bool:
    """Whether `dflash prepare` finished writing this directory."""
    return (path / META).is_file() and (path / DOCUMENTS).is_file()


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    for document in documents:
        chunk.append(document)
        if len(chunk) == WRITE_BATCH:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _flat(row: pa.Table, name: str) -> pa.Array:
    return row.column(name).chunk(0).flatten()


def _broken(directory: Path, got: str) -> DataError:
    return DataError("a finished store", got, "run `dflash prepare` again", where=str(directory))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
