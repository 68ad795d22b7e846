"""Every chat shape becomes the same messages; what is not a conversation is named by file and row."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.chat import load_conversations, read_conversations
from dflash.errors import DataError
from tests.data.conftest import WriteRows, chat

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def only(path: Path) -> list[dict[str, Any]]:
    (conversation,) = read_conversations(path)
    return conversation.messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("q", "a")},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, chat("q", "a")[1]]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": chat("q", "a")},
        {"prompt": "q", "completion": "a"},
        {"prompt": chat("q"), "completion": [chat("", "a")[1]]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": "another", "messages": chat("q", "a")},
    ],
)
def test_each_shape_becomes_user_and_assistant(write_rows: WriteRows, row: dict[str, Any]) -> None:
    assert only(write_rows(row)) == chat("q", "a")


def test_parquet_gives_the_same_conversations_as_jsonl(write_rows: WriteRows, tmp_path: Path) -> None:
    rows = [{"messages": chat("q", "a")}, {"messages": chat("r", "b", "s", "c")}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    lines, table = read_conversations(write_rows(*rows)), read_conversations(tmp_path / "chats.parquet")
    assert [c.messages for c in lines] == [c.messages for c in table]


def test_instruction_and_input_are_joined_by_a_blank_line(write_rows: WriteRows) -> None:
    path = write_rows({"instruction": "do", "input": "this", "output": "a"})
    assert only(path) == chat("do\n\nthis", "a")


def test_a_system_column_comes_first_unless_the_messages_have_one(write_rows: WriteRows) -> None:
    system = {"role": "system", "content": "be brief"}
    assert only(write_rows({"system": "be brief", "messages": chat("q", "a")})) == [system, *chat("q", "a")]
    assert only(write_rows({"system": "x", "messages": [system, *chat("q", "a")]})) == [system, *chat("q", "a")]


def test_thinking_and_tool_calls_are_kept_and_other_keys_are_not(write_rows: WriteRows) -> None:
    call = {"function": {"name": "f", "arguments": {"x": None, "y": [1]}}}
    turn = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call], "score": 3}
    path = write_rows({"messages": [*chat("q"), turn, {"role": "tool", "content": "4"}], "tools": json.dumps([TOOL])})
    (conversation,) = read_conversations(path)
    kept = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert conversation.messages[1] == kept
    assert conversation.tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "  "])
def test_no_tools_is_none_however_it_is_written(write_rows: WriteRows, tools: object) -> None:
    (conversation,) = read_conversations(write_rows({"messages": chat("q", "a"), "tools": tools}))
    assert conversation.tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "q"}, "got the keys text; rename"),
        ({"message": chat("q")}, "did you mean messages instead of message"),
        ({}, "got the keys none"),
        ({"messages": []}, "an empty conversation"),
        ({"messages": "q"}, "a list in messages, got str"),
        ({"messages": ["q"]}, r"role and content in messages\[0\]"),
        ({"messages": [{"content": "q"}]}, r"role and content in messages\[0\]"),
        ({"messages": [*chat("q"), {"role": "narrator", "content": "x"}]}, r"known role in messages\[1\], got 'narr"),
        ({"messages": [{"role": "user"}]}, r"text as content of messages\[0\], got null"),
        ({"messages": [{"role": "user", "content": 3}]}, "got int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of text .* got image_url"),
        ({"messages": chat("q", "a"), "tools": "{"}, "JSON in tools"),
        ({"messages": chat("q", "a"), "tools": {"a": 1}}, "a list in tools, got dict"),
        ({"messages": chat("q", "a"), "tools": [3]}, "objects in tools, got 3"),
        ({"prompt": 3, "completion": "a"}, "text as content of the row, got int"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_that_is_no_conversation_is_named(write_rows: WriteRows, row: dict[str, Any], message: str) -> None:
    path = write_rows({"messages": chat("q", "a")}, row)
    with pytest.raises(DataError, match=message) as caught:
        list(read_conversations(path))
    assert str(caught.value).startswith(f"{path}:2: expected ")


def test_half_of_a_surrogate_pair_is_an_error_and_a_whole_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude42 \\u0000", "completion": "a"}\n')
    assert only(path)[0]["content"] == "\U0001f642 \0"
    path.write_text('{"prompt": "\\ud83d", "completion": "a"}\n')
    with pytest.raises(DataError, match="half of a surrogate pair"):
        only(path)


def test_a_row_without_an_answer_is_a_conversation_still(write_rows: WriteRows) -> None:
    (conversation,) = read_conversations(write_rows({"prompt": "q"}))
    assert conversation.first_answer is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "response": "a"}, "answer to prompt in completion, got it in response, .* rename response to"),
        ({"prompt": "q", "output": "a"}, "rename output to completion"),
        ({"prompt": "q", "complation": "a"}, "rename complation to completion"),
        ({"prompt": "q", "Answer": chat("", "a")[1:]}, "rename Answer to completion"),
        ({"instruction": "q", "input": "", "response": "a"}, "rename response to output"),
        ({"messages": chat("q"), "reply": "a"}, "move reply into messages"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_answer_under_a_name_that_is_not_read_is_an_error(
    write_rows: WriteRows, tmp_path: Path, row: dict[str, Any], message: str, kind: str
) -> None:
    path = write_rows(row)
    if kind == "parquet" and "complation" not in row and "Answer" not in row:  # of a table, only known columns are read
        path = tmp_path / "chats.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(DataError, match=message) as caught:
        list(read_conversations(path))
    assert str(caught.value).startswith(f"{path}:1: expected ")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a", "answer": "reference"},
        {"messages": chat("q", "a"), "response": "another"},
    ],
)
def test_bookkeeping_beside_an_answer_is_not_an_error(write_rows: WriteRows, row: dict[str, Any]) -> None:
    assert only(write_rows(row)) == chat("q", "a")


@pytest.mark.parametrize("value", [None, "", 3])
def test_a_question_whose_other_columns_hold_no_text_is_a_prompt_still(write_rows: WriteRows, value: object) -> None:
    assert only(write_rows({"prompt": "q", "target": value, "topic": "x"})) == chat("q")


def test_a_limit_stops_before_a_bad_row_is_reached(write_rows: WriteRows) -> None:
    path = write_rows({"prompt": "q"}, {"prompt": "r"}, {"text": "bad"})
    assert len(list(read_conversations(path, limit=2))) == 2
    with pytest.raises(DataError):
        list(read_conversations(path, limit=3))
    path.write_text(path.read_text().replace("{\"text\"", "{bad"))
    assert len(list(read_conversations(path, limit=2))) == 2
    with pytest.raises(DataError):
        list(read_conversations(path, limit=3))


def test_a_dataset_keeps_arguments_of_different_calls_apart(write_rows: WriteRows) -> None:
    """Arrow structs would give each call the other's keys."""
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {k: 1}}}]} for k in "xy"]
    path = write_rows(*({"messages": [*chat("q"), turn], "tools": [TOOL]} for turn in turns))
    dataset = load_conversations(path)
    assert [row["messages"][1] for row in dataset] == turns
    assert dataset[1]["tools"] == [TOOL]
    assert dataset[1]["source"] == f"{path}:2"


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("from dflash.data.chat import load_conversations as load; load({path!r})[0]", False),
        ("from datasets import load_dataset; load_dataset('json', data_files={path!r})", True),
    ],
    ids=["dflash", "datasets by itself"],
)
def test_reading_writes_nothing_below_the_home_directory(
    write_rows: WriteRows, tmp_path: Path, code: str, writes: bool
) -> None:
    path, home = write_rows({"messages": chat("q", "a")}), tmp_path / "home"
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code.format(path=str(path))], check=True, env=environment, timeout=120)
    assert bool(list(home.rglob("*"))) == writes
