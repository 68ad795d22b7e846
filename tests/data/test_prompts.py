"""Prompts are what the target would be asked: everything up to the first answer."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.prompts import heldout_prompts
from dflash.data.sources import open_documents
from dflash.data.template import Encoder
from dflash.errors import DataError
from tests.data.conftest import WriteRows, chat

ASKED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_ends_where_the_first_answer_begins(tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
    path = write_rows({"messages": chat("q", "a", "r", "b")}, {"prompt": "q"})
    assert [tokenizer.decode(ids) for ids in heldout_prompts(path, tokenizer)] == [ASKED, ASKED]


def test_a_limit_takes_the_first_ones(tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> None:
    path = write_rows({"prompt": "q"}, {"prompt": "r"}, {"prompt": "s"})
    assert heldout_prompts(path, tokenizer, limit=2) == heldout_prompts(path, tokenizer)[:2]


def test_a_store_gives_the_prompts_of_its_conversations(
    tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows({"messages": chat("q", "a")}, {"messages": chat("r", "b", "s", "c")})
    open_documents(str(path), Encoder(tokenizer, 512), tmp_path / "store")
    assert heldout_prompts(tmp_path / "store", tokenizer) == heldout_prompts(path, tokenizer)
    tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(DataError, match="target's vocabulary"):
        heldout_prompts(tmp_path / "store", tokenizer)


def test_a_conversation_that_the_assistant_begins_is_an_error(
    tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    path = write_rows({"prompt": "q"}, {"messages": chat("q", "a")[1:]})
    with pytest.raises(DataError, match=r"chats.jsonl:2: expected a question first, got the assistant"):
        heldout_prompts(path, tokenizer)
