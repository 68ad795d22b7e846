"""A store gives back what was written, is whole or not there, and refuses what does not belong to it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash.data.documents import DOCUMENTS, META, USED, WRITE_BATCH, Document, DocumentStore, is_store
from dflash.errors import DataError, OutputError
from tests.data.conftest import meta, random_documents, store_of


@pytest.mark.parametrize("count", [1, WRITE_BATCH, WRITE_BATCH + 3])
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_store_gives_back_its_documents(tmp_path: Path, count: int, on_disk: bool) -> None:
    documents = random_documents([1 + i % 9 for i in range(count)])
    if on_disk:
        store = DocumentStore.write(tmp_path / "store", iter(documents), meta())
    else:
        store = DocumentStore.from_documents(documents, meta())
    assert len(store) == count
    for expected, found in zip(documents, store, strict=True):
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.loss_mask.tolist() == expected.loss_mask.tolist()
        assert (found.id, found.source, found.ids_hash) == (expected.id, expected.source, expected.ids_hash)
    assert store.lengths.tolist() == [len(d) for d in documents]
    assert store.meta.tokens == sum(len(d) for d in documents)
    assert store.meta.supervised_tokens == sum(int(d.loss_mask.sum()) for d in documents)


def test_a_store_holds_nothing_but_its_three_files(tmp_path: Path) -> None:
    DocumentStore.write(tmp_path / "a" / "store", random_documents([3]), meta())
    assert {p.name for p in (tmp_path / "a" / "store").iterdir()} == {DOCUMENTS, USED, META}
    assert {p.name for p in tmp_path.iterdir()} == {"a"}


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_the_store_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        store_of([1, 2, 3])[index]


def test_the_hash_is_of_the_tokens_alone() -> None:
    a, b = random_documents([5, 5])
    same = Document(9, a.input_ids.copy(), ~a.loss_mask, "elsewhere")
    assert same.ids_hash == a.ids_hash
    assert b.ids_hash != a.ids_hash


def test_opening_reads_no_document(tmp_path: Path) -> None:
    """The data is mapped: its size on disk is not allocated."""
    DocumentStore.write(tmp_path, random_documents([1000] * 2000), meta(row_tokens=1000))
    import pyarrow

    before = pyarrow.total_allocated_bytes()
    store = DocumentStore.open(tmp_path)
    assert int(store.lengths.sum()) == 2_000_000
    assert len(store[1999]) == 1000
    assert pyarrow.total_allocated_bytes() - before < 1_000_000 < (tmp_path / DOCUMENTS).stat().st_size


def broken() -> Iterator[Document]:
    yield from random_documents([3] * (WRITE_BATCH + 1))
    raise DataError("a row", "a bad one", "correct it", where="f:600")


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="f:600"):
        DocumentStore.write(tmp_path / "store", broken(), meta())
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_rewriting_leaves_the_older_store(tmp_path: Path) -> None:
    DocumentStore.write(tmp_path, random_documents([3, 4]), meta())
    with pytest.raises(DataError, match="f:600"):
        DocumentStore.write(tmp_path, broken(), meta())
    assert DocumentStore.open(tmp_path).lengths.tolist() == [3, 4]


def test_a_store_half_replaced_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DocumentStore.write(tmp_path, random_documents([3, 4]), meta())
    replace = Path.replace

    def fail_at_the_second(self: Path, target: Path) -> Path:
        if self.name == USED:
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_at_the_second)
    with pytest.raises(OutputError, match="Input/output error"):
        DocumentStore.write(tmp_path, random_documents([9, 9]), meta())
    assert not is_store(tmp_path)
    with pytest.raises(DataError, match=f"got no {META}"):
        DocumentStore.open(tmp_path)


def test_a_full_disk_is_an_output_error_and_leaves_nothing(tmp_path: Path) -> None:
    def full() -> Iterator[Document]:
        yield from random_documents([3])
        raise OSError(28, "No space left on device")

    with pytest.raises(OutputError, match="No space left on device; free some space"):
        DocumentStore.write(tmp_path / "store", full(), meta())
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_behind_is_no_store_and_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / DOCUMENTS).write_bytes(b"half")
    assert not is_store(tmp_path)
    DocumentStore.write(tmp_path, random_documents([3]), meta())
    assert is_store(tmp_path)


def test_a_store_without_documents_is_an_error_that_says_what_was_left_out(tmp_path: Path) -> None:
    dropped = meta()
    object.__setattr__(dropped, "counts", {"kept": 0, "dropped": 7})
    with pytest.raises(DataError, match="at least one document to train on, got 7 dropped"):
        DocumentStore.write(tmp_path / "store", [], dropped)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [DOCUMENTS, USED, META])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_a_damaged_store_is_an_error(tmp_path: Path, name: str, damage: str) -> None:
    DocumentStore.write(tmp_path, random_documents([3] * 900), meta())
    assert len(DocumentStore.open(tmp_path)) == 900
    file = tmp_path / name
    content = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "garbage": b"garbage" * 9}.get(damage, b""))
    if damage == "missing":
        file.unlink()
    with pytest.raises(DataError, match=r"expected a finished store, got .*; run `dflash prepare` again") as caught:
        DocumentStore.open(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"format": 99}, {"extra": 1}])
def test_a_store_of_another_version_is_an_error(tmp_path: Path, change: dict[str, int]) -> None:
    DocumentStore.write(tmp_path, random_documents([3]), meta())
    values = json.loads((tmp_path / META).read_text())
    (tmp_path / META).write_text(json.dumps(values | change))
    with pytest.raises(DataError, match="a finished store"):
        DocumentStore.open(tmp_path)


def test_another_vocabulary_or_template_is_an_error() -> None:
    store = store_of([3])
    store.check_vocabulary("v" * 64, "t" * 64)
    with pytest.raises(DataError, match="target's vocabulary"):
        store.check_vocabulary("w" * 64, "t" * 64)
    with pytest.raises(DataError, match="target's chat template"):
        store.check_vocabulary("v" * 64, "u" * 64)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_mask_token_in_the_data_is_an_error_that_names_the_conversation(at: int) -> None:
    documents = random_documents([7] * 700, vocab_size=50)
    documents[600].input_ids[at] = 55
    store = DocumentStore.from_documents(documents, meta())
    with pytest.raises(DataError, match=r"never occurs in the data \(id 55\), got .*\(f.jsonl:601\)"):
        store.check_mask_token(55)
    for unused in (54, 63, 64, 5000):
        store.check_mask_token(unused)


def test_the_tokens_in_use_survive_the_disk(tmp_path: Path) -> None:
    documents = random_documents([4, 4])
    used = np.unique(np.concatenate([d.input_ids for d in documents]))
    store = DocumentStore.write(tmp_path, documents, meta())
    assert np.flatnonzero(store.used).tolist() == used.tolist()
