"""Conversations: the chat shapes people have, brought to one: messages of role and content, and the tools offered."""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value

from dflash.data.files import Row, read_rows
from dflash.errors import DataError

Message = dict[str, Any]
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "function",
}  # fmt: skip
SHAPES = "messages, conversations, prompt + completion, or instruction + input + output"
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "tools")
# names other people give to an answer; beside a question without one they are taken for a mistake, not for bookkeeping
ANSWERS = (
    "response", "responses", "answer", "answers", "output", "outputs", "completion", "completions", "target", "targets",
    "reply", "replies", "chosen", "result", "generation", "solution", "assistant", "gpt",
)  # fmt: skip
# where each shape keeps its answer
ANSWER_OF = {"prompt": "completion", "instruction": "output"}
# what a turn may carry besides role and content; anything else is the data set's own bookkeeping
EXTRAS = ("reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class Conversation:
    """Messages with a known role and text content, the tools offered as JSON schemas, and `file:row`."""

    messages: list[Message]
    source: str = ""
    tools: list[dict[str, Any]] | None = None

    @property
    def first_answer(self) -> int | None:
        """Index of the first assistant message."""
        return next((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), None)


def read_conversations(path: Path | str, limit: int | None = None) -> Iterator[Conversation]:
    """Conversations of a file, directory or glob pattern, one by one, at most `limit`; nothing is cached.

    Raises DataError naming file and row for the first one that is not a conversation.
    """
    # islice does not look at the row after the last one
    for source, row in islice(read_rows(path, (*COLUMNS, *ANSWERS)), limit):
        yield _conversation(row, source)


def load_conversations(path: Path | str, limit: int | None = None) -> Dataset:
    """All conversations as a `datasets.Dataset` in memory: messages, tools (or none), source; nothing is cached.

    Messages are held as JSON, which keeps tool arguments of different keys apart, and parsed when a row is read.
    """
    columns: dict[str, list[str | None]] = {"messages": [], "tools": [], "source": []}
    for conversation in read_conversations(path, limit):
        columns["messages"].append(json.dumps(conversation.messages))
        columns["tools"].append(None if conversation.tools is None else json.dumps(conversation.tools))
        columns["source"].append(conversation.source)
    features = Features({name: Value("string") for name in columns})
    return Dataset.from_dict(columns, features=features).with_transform(_parse_columns)


def _parse_columns(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {
        name: values if name == "source" else [None if v is None else json.loads(v) for v in values]
        for name, values in batch.items()
    }


def _conversation(row: Row, source: str) -> Conversation:
    messages = _messages(row, source)
    if not messages:
        raise DataError("at least one message", "an empty conversation", "delete the row", where=source)
    if all(m["role"] != "assistant" for m in messages):
        _check_no_lost_answer(row, source)
    if row.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text(row["system"], source)}, *messages]
    return Conversation(messages, source, _tools(row.get("tools"), source))


def _check_no_lost_answer(row: Row, source: str) -> None:
    """DataError when a conversation without an answer has one under a name that is not read."""
    shape = next(key for key in ("messages", "conversations", "prompt", "instruction") if key in row)
    accepted = ANSWER_OF.get(shape)
    for key, value in row.items():
        close = accepted is not None and difflib.get_close_matches(key.lower(), [accepted], cutoff=0.75)
        if key == accepted or not (value and isinstance(value, str | list)) or not (key.lower() in ANSWERS or close):
            continue
        if accepted is None:
            expected, remedy = f"the answer as an assistant's turn in {shape}", f"move {key} into {shape}"
        else:
            expected, remedy = f"the answer to {shape} in {accepted}", f"rename {key} to {accepted}"
        raise DataError(expected, f"it in {key}, which is not read", remedy, where=source)


def _messages(row: Row, source: str) -> list[Message]:
    """The first of the known shapes that the row has."""
    for key in ("messages", "conversations"):
        if key in row:
            return _turns(row[key], key, source)
    if "prompt" in row:
        return _turns_or_text(row, "prompt", "user", source) + _turns_or_text(row, "completion", "assistant", source)
    if "instruction" in row:
        question = _text(row["instruction"], source)
        if extra := row.get("input"):
            question += "\n\n" + _text(extra, source)
        return [{"role": "user", "content": question}, *_turns_or_text(row, "output", "assistant", source)]
    keys = ", ".join(sorted(row)[:8]) or "none"
    remedy = _nearest(row) or "rename its columns"
    raise DataError(f"a conversation ({SHAPES})", f"the keys {keys}", remedy, where=source)


def _nearest(row: Row) -> str | None:
    for key in row:
        if close := difflib.get_close_matches(key, COLUMNS, n=1, cutoff=0.75):
            return f"did you mean {close[0]} instead of {key}?"
    return None


def _turns_or_text(row: Row, key: str, role: str, source: str) -> list[Message]:
    value = row.get(key)
    if value is None:
        return []
    if isinstance(value, list):
        return _turns(value, key, source)
    return [{"role": role, "content": _text(value, source)}]


def _turns(value: Any, key: str, source: str) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"a list in {key}", type(value).__name__, "see the chat shapes in the README", where=source)
    return [_turn(turn, f"{key}[{i}]", source) for i, turn in enumerate(value)]


def _turn(turn: Any, place: str, source: str) -> Message:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise DataError(f"role and content in {place}", repr(turn)[:60], "add the role", where=source)
    if role not in ROLES:
        remedy = "use system, user, assistant or tool"
        raise DataError(f"a known role in {place}", repr(role), remedy, where=source)
    extras = {name: turn[name] for name in EXTRAS if turn.get(name) is not None}
    content = turn.get("content", turn.get("value"))
    if content is None and "tool_calls" in extras:
        content = ""
    return {"role": ROLES[role], "content": _text(content, source, place), **extras}


def _text(value: Any, source: str, place: str = "the row") -> str:
    """Text as it is, or the texts of content parts joined; anything else is an error."""
    if isinstance(value, list):
        return "".join(_part(part, source, place) for part in value)
    if not isinstance(value, str):
        got = "null" if value is None else type(value).__name__
        raise DataError(f"text as content of {place}", got, "correct or delete the row", where=source)
    if _has_lone_surrogate(value):
        raise DataError(f"text in {place}", "half of a surrogate pair", "correct the escape", where=source)
    return value


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _part(part: Any, source: str, place: str) -> str:
    if isinstance(part, str):
        return _text(part, source, place)
    if isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
        return _text(part["text"], source, place)
    got = str(part.get("type", "a part without text")) if isinstance(part, dict) else type(part).__name__
    raise DataError(f"parts of text in {place}", got, "dflash trains on text: delete the row", where=source)


def _tools(value: Any, source: str) -> list[dict[str, Any]] | None:
    """Tools as JSON schemas; given as a list or as JSON text; empty means none."""
    value = _parsed(value, source)
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError("a list in tools", type(value).__name__, "correct the row", where=source)
    tools = [_parsed(tool, source) for tool in value]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise DataError("objects in tools", repr(wrong[0])[:60], "give each tool as a JSON schema", where=source)
    return tools


def _parsed(value: Any, source: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value if not isinstance(value, str) else None
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError("JSON in tools", error.msg, "correct the row", where=source) from None
