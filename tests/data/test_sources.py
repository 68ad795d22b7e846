"""Training data is opened the same from files and from a store made of them; a store of other making is refused."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.documents import DocumentStore
from dflash.data.sources import mask_source, open_documents
from dflash.data.template import Encoder
from dflash.errors import DataError
from tests.data.conftest import WriteRows, chat


def tokens(store: DocumentStore) -> list[list[int]]:
    return [d.input_ids.tolist() for d in store]


def test_files_in_memory_files_on_disk_and_the_store_give_the_same(
    tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows(*({"messages": chat(f"q{i}", f"a{i}")} for i in range(5)), {"messages": chat("q0", "a0")})
    store = tmp_path / "store"
    in_memory = open_documents(str(path), Encoder(tokenizer, 512))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chats.jsonl"]
    written = open_documents(str(path), Encoder(tokenizer, 512), store)
    opened = open_documents(str(store), Encoder(tokenizer, 512))
    assert tokens(in_memory) == tokens(written) == tokens(opened)
    assert in_memory.meta == written.meta == opened.meta
    assert opened.meta.counts["duplicates"] == 1


def test_a_store_knows_where_its_mask_came_from_whatever_is_asked_for(
    tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = str(write_rows({"messages": chat("q", "a b c")}))
    open_documents(path, Encoder(tokenizer, 512, mask_from="prefix"), tmp_path / "s")
    assert mask_source(str(tmp_path / "s"), "template") == "prefix"
    assert mask_source(path, "template") == "template"


def test_a_store_of_another_vocabulary_or_with_longer_documents_is_refused(
    tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, tmp_path: Path
) -> None:
    store = open_documents(str(write_rows({"messages": chat("q", "a b c")})), Encoder(tokenizer, 512), tmp_path / "s")
    longest = int(store.lengths.max())
    assert len(open_documents(str(tmp_path / "s"), Encoder(tokenizer, longest))) == 1
    with pytest.raises(DataError, match=f"at most {longest - 1} tokens, got one of {longest}"):
        open_documents(str(tmp_path / "s"), Encoder(tokenizer, longest - 1))
    tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(DataError, match="target's vocabulary"):
        open_documents(str(tmp_path / "s"), Encoder(tokenizer, 512))
