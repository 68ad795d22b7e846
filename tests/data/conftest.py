"""A tokenizer, and ways to write conversations, for the tests of dflash.data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.documents import Document, DocumentStore, StoreMeta
from tests.conftest import build_tokenizer

Messages = list[dict[str, Any]]
WriteRows = Callable[..., Path]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A fresh byte-level tokenizer: tests change its template."""
    return build_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Writes objects as JSONL."""

    def write(*rows: Any, name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def chat(*turns: str) -> Messages:
    """User and assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def random_documents(lengths: list[int], seed: int = 0, vocab_size: int = 50) -> list[Document]:
    """Documents of given lengths with random tokens and masks."""
    rng = np.random.default_rng(seed)
    return [
        Document(i, rng.integers(0, vocab_size, n).astype(np.int32), rng.random(n) < 0.5, f"f.jsonl:{i + 1}")
        for i, n in enumerate(lengths)
    ]


def meta(vocab_size: int = 64, row_tokens: int = 32, pad_id: int = 63) -> StoreMeta:
    """The meta data of a store made by hand."""
    return StoreMeta(vocab_size, "v" * 64, "t" * 64, row_tokens, pad_id)


def store_of(lengths: list[int], row_tokens: int = 32) -> DocumentStore:
    """A store in memory with documents of given lengths."""
    return DocumentStore.from_documents(random_documents(lengths), meta(row_tokens=row_tokens))
