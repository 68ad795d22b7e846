"""What `data.train` names - a store, files of conversations, or the embedded ones - opened as documents."""

from collections.abc import Callable
from pathlib import Path

from dflash.assets import EMBEDDED, embedded_path
from dflash.data.chat import read_conversations
from dflash.data.documents import DocumentStore, is_store, read_meta
from dflash.data.order import too_long
from dflash.data.template import Encoder, MaskFrom, template_sha256, vocabulary_sha256

Progress = Callable[[int, int], None]


def mask_source(name: str, asked: MaskFrom) -> MaskFrom:
    """Where the loss mask comes from: a prepared store holds its mask and says so, whatever is asked for."""
    if name == EMBEDDED or not is_store(Path(name)):
        return asked
    return "prefix" if read_meta(Path(name)).mask_from == "prefix" else "template"


def open_documents(
    name: str, encoder: Encoder, directory: Path | None = None, progress: Progress | None = None
) -> DocumentStore:
    """A prepared store as it is; conversations are encoded into `directory` (memory-mapped) or, without it, in memory.

    progress(done, 0): conversations encoded so far, their total being unknown. Raises DataError for a store of another
    vocabulary, template or with documents longer than encoder.options.row_tokens, and as reading and encoding do.
    """
    path = embedded_path("train.jsonl") if name == EMBEDDED else Path(name)
    if is_store(path):
        store = DocumentStore.open(path)
        store.check_vocabulary(vocabulary_sha256(encoder.tokenizer), template_sha256(encoder.tokenizer))
        if (longest := int(store.lengths.max())) > encoder.options.row_tokens:
            raise too_long(longest, encoder.options.row_tokens, str(path))
        return store
    documents = encoder.encode_all(read_conversations(path), progress)
    if directory is None:
        return DocumentStore.from_documents(documents, encoder.meta(), str(path))
    return DocumentStore.write(directory, documents, encoder.meta())
