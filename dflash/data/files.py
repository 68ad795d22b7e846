"""Files of rows: JSONL (plain or gzip), Parquet, Arrow and saved `datasets`; each row with the place it came from."""

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_from_disk

from dflash.errors import DataError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
READ_BATCH = 256
PARQUET_MAGIC, GZIP_MAGIC, ZSTD_MAGIC = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
UTF8_BOM, UTF16_BOMS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


def read_rows(path: Path | str, columns: Iterable[str]) -> Iterator[tuple[str, Row]]:
    """Rows of a file, a glob pattern or a directory, as (`file:row`, row), rows counted from 1; nothing is cached.

    The kind of a file is told by its first bytes, not its name. `columns`: what is read of a columnar file.
    Raises DataError naming file and row for anything that cannot be read, and for input without any row.
    """
    wanted, found = frozenset(columns), False
    for file in find_files(path):
        for number, row in _read_file(file, wanted):
            found = True
            yield f"{file}:{number}", row
    if not found:
        raise DataError("at least one conversation", "none", "check that this is the file you meant", where=str(path))


def find_files(path: Path | str) -> list[Path]:
    """The files a path, a directory or a glob pattern names, sorted. Raises DataError when there is none."""
    path = Path(path)
    if path.is_file() or _is_saved_dataset(path):
        return [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.name.endswith(SUFFIXES))
        if not files:
            names = ", ".join(SUFFIXES)
            raise DataError(f"files ending in {names}", "a directory without any", "name the file", where=str(path))
        return files
    files = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())
    if not files:
        raise DataError("a JSONL or Parquet file", "no such file", "check the path", where=str(path))
    return files


def _read_file(file: Path, columns: frozenset[str]) -> Iterator[tuple[int, Row]]:
    if file.is_dir():
        yield from _read_saved_dataset(file, columns)
        return
    try:
        with file.open("rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise DataError("a readable file", str(error.strerror), "check its permissions", where=str(file)) from error
    if start == PARQUET_MAGIC:
        yield from _read_parquet(file, columns)
    elif start[:2] == GZIP_MAGIC:
        with gzip.open(file, "rb") as unpacked:
            yield from _read_jsonl(unpacked, file)
    elif start == ZSTD_MAGIC:
        raise DataError("JSONL, gzip or Parquet", "a zstd file", "unpack it first: zstd -d", where=str(file))
    elif start[:2] in UTF16_BOMS:
        raise DataError("UTF-8", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8", where=str(file))
    else:
        with file.open("rb") as stream:
            yield from _read_jsonl(stream, file)


def _read_jsonl(stream: Iterable[bytes], file: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    try:
        # bytes are split at \n only: text lines would also break at U+2028 inside a JSON string
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(UTF8_BOM) if number == 1 else line
            if line.strip():
                yield number, _parse(line, f"{file}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        place = f"{file}:{number + 1}"
        raise DataError("a whole gzip file", f"a damaged one ({error})", "download it again", where=place) from error


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{line[error.start]:02x} at {error.start}"
        raise DataError("UTF-8 text", got, "convert the file to UTF-8", where=where) from None
    except json.JSONDecodeError as error:
        raise _malformed(line, error, where) from None
    except ValueError as error:  # a number of more digits than Python converts
        raise DataError("a JSON object", str(error), "correct or delete the line", where=where) from None
    except RecursionError:
        raise DataError("a flat JSON object", "one nested too deeply", "delete the row", where=where) from None
    if not isinstance(row, dict):
        remedy = "write one object a line: jq -c '.[]'" if isinstance(row, list) else "write one object a line"
        raise DataError("a JSON object", f"a JSON {_kind(row)}", remedy, where=where)
    return row


def _malformed(line: bytes, error: json.JSONDecodeError, where: str) -> DataError:
    if b"\0" in line:
        return DataError(
            "a JSON object", "NUL bytes, as a write cut short leaves them", "write the file again", where=where
        )
    if line.strip() in (b"[", b"{"):
        return DataError("one JSON object a line", "JSON over several lines", "convert it: jq -c", where=where)
    got = f"malformed JSON ({error.msg} at column {error.colno})"
    return DataError("a JSON object", got, "correct or delete the line", where=where)


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _read_parquet(file: Path, columns: frozenset[str]) -> Iterator[tuple[int, Row]]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            names = [name for name in table.schema_arrow.names if name in columns]
            for batch in table.iter_batches(READ_BATCH, columns=names):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(row)
    except (pa.ArrowException, OSError) as error:
        got = f"a damaged one ({str(error).splitlines()[0]})"
        raise DataError("a whole Parquet file", got, "write it again", where=f"{file}:{number + 1}") from error


def _read_saved_dataset(directory: Path, columns: frozenset[str]) -> Iterator[tuple[int, Row]]:
    if (directory / "dataset_dict.json").is_file():
        raise DataError(
            "one split of a saved dataset", "a directory with all splits", "name the split's directory",
            where=str(directory),
        )
    try:
        dataset = load_from_disk(str(directory))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        got = f"one that cannot be read ({str(error).splitlines()[0]})"
        raise DataError("a saved dataset", got, "save it again", where=str(directory)) from error
    dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    for number, row in enumerate(dataset, start=1):
        yield number, _without_nulls(row)


def _is_saved_dataset(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _without_nulls(value: Any) -> Any:
    """Drops null fields: Arrow gives every struct the keys of all others, and templates would print them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
