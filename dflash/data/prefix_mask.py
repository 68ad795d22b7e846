"""The loss mask of templates without generation blocks: an answer starts where the prompt rendered before it ends."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.data.chat import Conversation
from dflash.errors import DataError


def mask_by_prefix(tokenizer: Any, conversation: Conversation) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Tokens [T] int32 and loss mask [T] bool of one conversation, by rendering it up to each answer.

    An answer starts where the prompt (rendered with the generation prompt) ends, which must be a prefix of the whole.
    It ends with the first end token, where generation would stop, or, when the template writes none, where the
    conversation rendered up to the answer ends. Raises DataError when one of them cannot be found.
    """
    whole = _render(tokenizer, conversation, len(conversation.messages), prompt=False)
    out = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = np.array(out["input_ids"], dtype=np.int32), np.array(out["offset_mapping"]).reshape(-1, 2)
    mask = np.zeros(len(ids), dtype=bool)
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    starts = [_start(tokenizer, conversation, i, whole) for i in answers]
    eos = tokenizer.eos_token_id
    ends = offsets[ids == eos] if eos is not None else offsets[:0]
    for i, start, following in zip(answers, starts, [*starts[1:], len(whole)], strict=True):
        limit = _limit(tokenizer, conversation, i, whole, following)
        inside = ends[(ends[:, 0] >= start) & (ends[:, 1] <= limit)]
        stop = int(inside[0, 1]) if len(inside) else limit
        mask |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
    return ids, mask


def _render(tokenizer: Any, conversation: Conversation, count: int, *, prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        conversation.messages[:count], tools=conversation.tools, add_generation_prompt=prompt, tokenize=False
    )
    return text


def _start(tokenizer: Any, conversation: Conversation, answer: int, whole: str) -> int:
    if answer == 0:
        raise DataError("a question first", "the assistant", "delete the row", where=conversation.source)
    prompt = _render(tokenizer, conversation, answer, prompt=True)
    if not whole.startswith(prompt):
        raise _not_a_prefix("the prompt of", answer, conversation.source)
    return len(prompt)


def _limit(tokenizer: Any, conversation: Conversation, answer: int, whole: str, following: int) -> int:
    """Where the answer ends at the latest.

    Templates that strip thoughts render the last answer otherwise than the same one in the middle. Then its end token
    marks the end, which the template must be seen to write, or that of the next turn would be taken for it.
    """
    text = _render(tokenizer, conversation, answer + 1, prompt=False)
    if whole.startswith(text):
        return len(text)
    prompt = _render(tokenizer, conversation, answer, prompt=True)
    if tokenizer.eos_token is None or tokenizer.eos_token not in text[len(prompt) :]:
        raise _not_a_prefix("the text up to", answer, conversation.source)
    return following


def _not_a_prefix(what: str, answer: int, source: str) -> DataError:
    return DataError(
        "a chat template that only appends",
        f"one that renders {what} messages[{answer}] otherwise within the whole",
        "mark the assistant's words with {% generation %} in the template, or delete the row",
        where=source,
    )
