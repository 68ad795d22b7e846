"""From conversations to documents: the target's chat template gives both the tokens and the loss mask."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError
from numpy.typing import NDArray

from dflash.data.chat import Conversation, Message
from dflash.data.documents import Document, StoreMeta
from dflash.data.prefix_mask import mask_by_prefix
from dflash.data.rendered import Blanks, unrendered
from dflash.errors import DataError, TargetError

MaskFrom = Literal["template", "prefix"]
# conversations a call of the tokenizer: enough to use its threads, few enough to keep memory flat
ENCODE_BATCH = 256
# what templates raise: their own complaints, and Python's for a message they did not expect
RENDER_ERRORS = (TemplateError, TypeError, ValueError, KeyError)
Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]


@dataclass
class EncodeCounts:
    """What became of the conversations; every one is counted once as kept, dropped, no_assistant or unsupervised."""

    kept: int = 0
    # kept, but cut at row_tokens
    truncated: int = 0
    # left out because longer than row_tokens
    dropped: int = 0
    # left out because the assistant never speaks
    no_assistant: int = 0
    # left out because no two neighbouring tokens are supervised, so that no block can start in it
    unsupervised: int = 0
    # kept, though an earlier document has the same tokens
    duplicates: int = 0
    # kept, though the tokens do not start with the prompt as inference would tokenise it
    other_prompt: int = 0
    # conversations of which the template shows nothing of the tools offered, the calls made, or the thoughts
    tools_not_rendered: int = 0
    tool_calls_not_rendered: int = 0
    thoughts_not_rendered: int = 0
    # assistant turns not trained on because nothing but their end is rendered
    empty_turns: int = 0


@dataclass(frozen=True)
class EncodeOptions:
    """How conversations become documents."""

    # longest document, in tokens
    row_tokens: int
    # a longer conversation: cut at row_tokens, leave out, or stop
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    # a conversation in which the assistant never speaks: stop, or leave out
    no_assistant: Literal["error", "drop"] = "error"
    # where the loss mask comes from: the template's own generation blocks, or prompts rendered before each answer
    mask_from: MaskFrom = "template"
    # what stands before an option's name on the user's command line
    prefix: str = "--data."


class Encoder:
    """Applies a tokenizer's chat template; `counts` says what became of what was encoded so far."""

    def __init__(
        self,
        tokenizer: Any,
        row_tokens: int,
        overlong: Literal["truncate", "drop", "error"] = "truncate",
        *,
        no_assistant: Literal["error", "drop"] = "error",
        mask_from: MaskFrom = "template",
        option_prefix: str = "--data.",
    ) -> None:
        """Raises DataError when the tokenizer has no chat template, or it cannot tell what the assistant says.

        option_prefix: what stands before an option's name on the user's command line, for messages.
        """
        self.tokenizer, self.counts = tokenizer, EncodeCounts()
        self.options = EncodeOptions(row_tokens, overlong, no_assistant, mask_from, option_prefix)
        self.template = chat_template(tokenizer)
        if not tokenizer.is_fast:
            raise TargetError("a fast tokenizer (tokenizer.json)", "a slow one", "convert it with transformers")
        if mask_from == "template" and not _marks_answers(self.template):
            where = str(getattr(tokenizer, "name_or_path", "") or "chat template")
            raise _no_generation_blocks(where, option_prefix)
        self._seen: set[bytes] = set()
        self._blanks = Blanks(tokenizer)

    def meta(self) -> StoreMeta:
        """What a store of these documents says about where they came from."""
        vocabulary = self.tokenizer.get_vocab()
        pad = next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0)
        return StoreMeta(
            vocab_size=max(vocabulary.values()) + 1,
            vocab_sha256=vocabulary_sha256(self.tokenizer),
            template_sha256=template_sha256(self.tokenizer),
            row_tokens=self.options.row_tokens,
            pad_id=pad,
            mask_from=self.options.mask_from,
            # the live attributes: a store asks for them when the last document is written
            counts=vars(self.counts),
        )

    def encode(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, source: str = ""
    ) -> Document | None:
        """One conversation; none when it is left out (see counts). Raises DataError as configured."""
        return next(self.encode_all([Conversation(messages, source, tools)]), None)

    def encode_all(
        self, conversations: Iterable[Conversation], progress: Callable[[int, int], None] | None = None, total: int = 0
    ) -> Iterator[Document]:
        """Documents of those conversations that are kept, ids from the number kept so far. progress(done, total)."""
        iterator, done = iter(conversations), 0
        while chunk := list(islice(iterator, ENCODE_BATCH)):
            spoken = [c for c in chunk if self.speaks(c)]
            for conversation, encoded in zip(spoken, self._tokenise(spoken), strict=True):
                if (document := self._document(conversation, *encoded)) is not None:
                    yield document
            done += len(chunk)
            if progress is not None:
                progress(done, total)

    def encode_untouched(self, conversation: Conversation) -> Encoded:
        """Tokens and mask of a whole conversation, neither cut nor counted: what a preview shows."""
        ids, mask = self._render([conversation])[0]
        return ids, self._blanks.clear(ids, mask)[0]

    def speaks(self, conversation: Conversation) -> bool:
        """Whether the assistant has a turn. Raises DataError when it must have one; counts those left out."""
        if conversation.first_answer is not None:
            return True
        if self.options.no_assistant == "error":
            roles = ", ".join(m["role"] for m in conversation.messages[:4])
            remedy = f"delete the row, or pass {self.options.prefix}no-assistant drop"
            raise DataError("an assistant's turn", f"only {roles}", remedy, where=conversation.source)
        self.counts.no_assistant += 1
        return False

    def _tokenise(self, conversations: list[Conversation]) -> list[Encoded]:
        """Encodes together what shares its tools: a call of the template takes one set of them."""
        results: dict[int, Encoded] = {}
        groups: dict[str, list[int]] = {}
        for i, conversation in enumerate(conversations):
            groups.setdefault(json.dumps(conversation.tools), []).append(i)
        for group in groups.values():
            together = [conversations[i] for i in group]
            rendered = self._render(together)
            self._compare_prompts(together, rendered)
            encoded = [self._trainable(c, *e) for c, e in zip(together, rendered, strict=True)]
            results.update(zip(group, encoded, strict=True))
        return [results[i] for i in range(len(conversations))]

    def _trainable(self, conversation: Conversation, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> Encoded:
        """The mask without turns of which only the end is rendered; counts them, and what the template leaves out."""
        for name in unrendered(self.tokenizer, conversation):
            field = f"{name}_not_rendered"
            setattr(self.counts, field, getattr(self.counts, field) + 1)
        mask, empty = self._blanks.clear(ids, mask)
        self.counts.empty_turns += empty
        return ids, mask

    def _render(self, conversations: list[Conversation]) -> list[Encoded]:
        try:
            return self._render_together(conversations)
        except DataError:
            raise
        except RENDER_ERRORS as error:
            if len(conversations) == 1:
                raise _rejected(error, conversations[0].source) from error
        # one of them is at fault: find it
        return [self._render([conversation])[0] for conversation in conversations]

    def _render_together(self, conversations: list[Conversation]) -> list[Encoded]:
        if self.options.mask_from == "prefix":
            return [mask_by_prefix(self.tokenizer, c) for c in conversations]
        out = self.tokenizer.apply_chat_template(
            [c.messages for c in conversations],
            tools=conversations[0].tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        return [
            (np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
            for ids, mask in zip(out["input_ids"], out["assistant_masks"], strict=True)
        ]

    def _compare_prompts(self, conversations: list[Conversation], encoded: list[Encoded]) -> None:
        """Counts documents that do not start with the prompt inference would see; a supervised prompt is an error.

        transformers (5.24) places a generation block inside a macro or a set block wrongly, without a word.
        """
        asked = [(c, e) for c, e in zip(conversations, encoded, strict=True) if c.first_answer]
        if not asked:
            return
        prompts = prompt_ids(self.tokenizer, [c for c, _ in asked])
        for prompt, (conversation, (ids, mask)) in zip(prompts, asked, strict=True):
            if not np.array_equal(ids[: len(prompt)], prompt):
                self.counts.other_prompt += 1
            elif mask[: len(prompt)].any():
                raise _supervised_prompt(conversation.source, self.options.prefix)

    def _document(
        self, conversation: Conversation, ids: NDArray[np.int32], mask: NDArray[np.bool_]
    ) -> Document | None:
        limit = self.options.row_tokens
        too_long = len(ids) > limit
        if too_long and self.options.overlong == "drop":
            self.counts.dropped += 1
            return None
        if too_long and self.options.overlong == "error":
            prefix = self.options.prefix
            remedy = f"raise {prefix}row-tokens, or pass {prefix}overlong truncate or drop"
            raise DataError(f"at most {limit} tokens", str(len(ids)), remedy, where=conversation.source)
        ids, mask = ids[:limit], mask[:limit]
        if not (mask[1:] & mask[:-1]).any():
            self.counts.unsupervised += 1
            return None
        return self._counted(Document(self.counts.kept, ids, mask, conversation.source), too_long)

    def _counted(self, document: Document, truncated: bool) -> Document:
        self.counts.kept += 1
        self.counts.truncated += truncated
        digest = hashlib.blake2b(document.input_ids.tobytes(), digest_size=8).digest()
        self.counts.duplicates += digest in self._seen
        self._seen.add(digest)
        return document


def prompt_ids(tokenizer: Any, conversations: list[Conversation]) -> list[list[int]]:
    """Token ids of each conversation up to its first answer, as inference would see them; same tools for all.

    Raises DataError when a conversation starts with the assistant.
    """
    prompts = [c.messages[: c.first_answer] for c in conversations]
    for conversation, prompt in zip(conversations, prompts, strict=True):
        if not prompt:
            raise DataError("a question first", "the assistant", "delete the row", where=conversation.source)
    try:
        out = tokenizer.apply_chat_template(
            prompts, tools=conversations[0].tools, add_generation_prompt=True, return_dict=True,
            tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
    except RENDER_ERRORS as error:
        if len(conversations) == 1:
            raise _rejected(error, conversations[0].source) from error
        return [prompt_ids(tokenizer, [c])[0] for c in conversations]
    ids: list[list[int]] = out["input_ids"]
    return ids


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's template, of several the default one. Raises TargetError when it has none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        where = str(getattr(tokenizer, "name_or_path", ""))
        raise TargetError(
            "a tokenizer with a chat template", "one without", "use an instruction-tuned target, or add "
            "chat_template.jinja to its directory", where=where,
        ) from None
    return template


def vocabulary_sha256(tokenizer: Any) -> str:
    """sha256 of every token with its id, in hex."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """sha256 of the chat template, in hex."""
    return hashlib.sha256(chat_template(tokenizer).encode()).hexdigest()


def _marks_answers(template: str) -> bool:
    """Whether the template has a generation block; read with jinja's lexer, so comments and text do not count."""
    try:
        tokens = [(kind, value) for _, kind, value in Environment().lex(template) if kind != "whitespace"]
    except TemplateSyntaxError as error:
        got = f"one with a syntax error ({error.message} at line {error.lineno})"
        raise TargetError("a chat template", got, "correct chat_template.jinja") from error
    return any(
        kind == "block_begin" and following == ("name", "generation")
        for (kind, _), following in pairwise(tokens)
    )


def _no_generation_blocks(where: str, prefix: str) -> DataError:
    return DataError(
        "a chat template that marks the assistant's words with {% generation %} ... {% endgeneration %}",
        "one without these blocks",
        f"put them round what the assistant says in chat_template.jinja, or pass {prefix}mask-from prefix",
        where=where,
    )


def _supervised_prompt(source: str, prefix: str) -> DataError:
    return DataError(
        "a chat template whose generation blocks begin after the generation prompt",
        "one that marks tokens of the prompt",
        f"put them round the answer alone, outside macro and set blocks, or pass {prefix}mask-from prefix",
        where=source,
    )


def _rejected(error: Exception, source: str) -> DataError:
    message = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        "a conversation the chat template accepts", f"its complaint ({message})", "correct or delete the row",
        where=source,
    )
