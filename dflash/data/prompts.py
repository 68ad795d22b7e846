"""Prompts: what the target is asked when acceptance is measured."""

from pathlib import Path
from typing import Any

from dflash.assets import EMBEDDED, embedded_path
from dflash.data.chat import read_conversations
from dflash.data.documents import DocumentStore, is_store
from dflash.data.template import prompt_ids, template_sha256, vocabulary_sha256


def heldout_prompts(path: Path | str, tokenizer: Any, limit: int | None = None) -> list[list[int]]:
    """Token ids of each conversation up to its first answer, the generation prompt added; at most `limit`.

    path: conversations in any accepted shape (an answer is not needed), a prepared store, or "embedded".
    Raises DataError as reading does, or when a conversation starts with the assistant.
    """
    source = embedded_path("heldout.jsonl") if str(path) == EMBEDDED else Path(path)
    if is_store(source):
        return _from_store(source, tokenizer, limit)
    return [prompt_ids(tokenizer, [c])[0] for c in read_conversations(source, limit)]


def _from_store(directory: Path, tokenizer: Any, limit: int | None) -> list[list[int]]:
    """A stored document's prompt is what comes before its first supervised token."""
    store = DocumentStore.open(directory)
    store.check_vocabulary(vocabulary_sha256(tokenizer), template_sha256(tokenizer))
    count = len(store) if limit is None else min(limit, len(store))
    documents = (store[i] for i in range(count))
    return [d.input_ids[: int(d.loss_mask.argmax())].tolist() for d in documents if d.loss_mask.argmax() > 0]
