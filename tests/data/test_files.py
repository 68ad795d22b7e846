"""Rows come out of every kind of file with the place they came from; what cannot be read is named by file and row."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from dflash.data.files import read_rows
from dflash.errors import DataError

GOOD = b'{"prompt": "p"}\n'


def rows_of(path: Path | str) -> list[tuple[str, dict[str, object]]]:
    return list(read_rows(path, ["prompt", "messages"]))


def write(tmp_path: Path, content: bytes, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        GOOD * 2,
        b"\xef\xbb\xbf" + GOOD * 2,
        GOOD.replace(b"\n", b"\r\n") * 2,
        GOOD + GOOD.rstrip(),
        gzip.compress(GOOD * 2, mtime=0),
        gzip.compress(GOOD, mtime=0) + gzip.compress(GOOD),
    ],
    ids=["plain", "byte order mark", "CRLF", "no last newline", "gzip", "gzip in two members"],
)
def test_two_rows_are_read_however_the_lines_are_kept(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    assert rows_of(path) == [(f"{path}:1", {"prompt": "p"}), (f"{path}:2", {"prompt": "p"})]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = write(tmp_path, b"\n  \r\n" + GOOD + b"\n" + GOOD)
    assert [source for source, _ in rows_of(path)] == [f"{path}:3", f"{path}:5"]


def test_line_separators_inside_a_string_do_not_break_the_row(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    path = write(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n")
    assert rows_of(path) == [(f"{path}:1", {"prompt": text})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "malformed JSON .* at column"),
        (b'{"prompt": "p"} x', "malformed JSON .Extra data at column 17"),
        (b'{"prompt": "\xff"}', "expected UTF-8 text, got byte 0xff at 12"),
        (b'{"prompt": "p"' + b"\0" * 9, "NUL bytes"),
        (b"\0" * 99, "NUL bytes"),
        (b'[{"prompt": "p"}]', "got a JSON array; write one object a line: jq"),
        (b'"text"', "got a JSON string"),
        (b"null", "got a JSON null"),
        (b"{", "JSON over several lines"),
        (b"[" * 100_000, "nested too deeply|malformed"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "digits"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path, GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=message) as caught:
        rows_of(path)
    assert str(caught.value).startswith(f"{path}:2: expected ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="at least one conversation, got none"):
        rows_of(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD * 1000, mtime=0)[:-20], "damaged"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
        ('{"prompt": "p"}'.encode("utf-16"), "UTF-16"),
        (b"PAR1 and then nothing", "whole Parquet file"),
    ],
    ids=["gzip cut short", "zstd", "UTF-16", "Parquet cut short"],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(write(tmp_path, content))


def test_parquet_is_told_by_its_content_and_read_by_column_without_nulls(tmp_path: Path) -> None:
    path = tmp_path / "named.jsonl"
    call = [{"a": {"x": 1, "y": None}}, {"a": {"x": None, "y": 2}}]
    pq.write_table(pa.table({"prompt": ["p", "q"], "messages": call, "other": [1, 2]}), path)
    assert rows_of(path) == [
        (f"{path}:1", {"prompt": "p", "messages": {"a": {"x": 1}}}),
        (f"{path}:2", {"prompt": "q", "messages": {"a": {"y": 2}}}),
    ]


def test_a_directory_and_a_pattern_give_their_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        write(tmp_path, GOOD, name)
    expected = [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b.jsonl:1"]
    assert [source for source, _ in rows_of(tmp_path)] == expected
    assert [source for source, _ in rows_of(f"{tmp_path}/*.jsonl")] == expected


def test_a_saved_dataset_is_read_as_it_is(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    Dataset.from_dict({"prompt": ["p", "q"], "other": [1, 2]}).save_to_disk(directory)
    before = sorted(directory.rglob("*"))
    assert rows_of(directory) == [(f"{directory}:1", {"prompt": "p"}), (f"{directory}:2", {"prompt": "q"})]
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize("name", ["missing.jsonl", "*.nothing"])
def test_no_such_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no such file"):
        rows_of(tmp_path / name)


def test_a_directory_without_data_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "notes.txt")
    with pytest.raises(DataError, match="a directory without any"):
        rows_of(tmp_path)
