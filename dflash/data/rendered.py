"""What of a conversation a chat template leaves out, and answers of which it shows nothing but their end."""

from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from dflash.data.chat import Conversation

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# tags that templates put round thoughts, also round none
EMPTY_TAGS = frozenset({"<think>", "</think>"})


def unrendered(tokenizer: Any, conversation: Conversation) -> list[str]:
    """Which of `tools`, `tool_calls` and `thoughts` the conversation has, and reads the same without.

    Renders text only, and only what has one of them: a plain conversation costs nothing.
    """
    parts = _parts(conversation)
    if not parts:
        return []
    whole = _text(tokenizer, conversation)
    return [name for name in parts if _text(tokenizer, _without(conversation, name)) == whole]


class Blanks:
    """Finds supervised runs without a word in them: special tokens, white space, and tags round no thoughts."""

    def __init__(self, tokenizer: Any) -> None:
        """Looks tokens up as they come: nearly always only the first of a run."""
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._known: dict[int, bool] = {}

    def clear(self, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], int]:
        """The mask [T] without such runs, and how many there were."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
        runs = [(a, b) for a, b in edges.reshape(-1, 2).tolist() if all(self._is_blank(i) for i in ids[a:b].tolist())]
        if runs:
            mask = mask.copy()
        for a, b in runs:
            mask[a:b] = False
        return mask, len(runs)

    def _is_blank(self, token: int) -> bool:
        known = self._known.get(token)
        if known is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False).strip()
            known = self._known[token] = token in self._special or not text or text in EMPTY_TAGS
        return known


def _parts(conversation: Conversation) -> list[str]:
    keys = {key for message in conversation.messages for key in message}
    found = {
        "tools": bool(conversation.tools), "tool_calls": "tool_calls" in keys, "thoughts": not keys.isdisjoint(THOUGHTS)
    }  # fmt: skip
    return [name for name, has in found.items() if has]


def _without(conversation: Conversation, name: str) -> Conversation:
    if name == "tools":
        return Conversation(conversation.messages, conversation.source)
    dropped = THOUGHTS if name == "thoughts" else (name,)
    messages = [{k: v for k, v in m.items() if k not in dropped} for m in conversation.messages]
    return Conversation(messages, conversation.source, conversation.tools)


def _text(tokenizer: Any, conversation: Conversation) -> str | None:
    """None when the template refuses it: a template that misses something has read it."""
    try:
        text: str = tokenizer.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=False)
    except (TemplateError, TypeError, ValueError, KeyError):
        return None
    return text
