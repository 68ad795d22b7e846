"""Answers are the model's own, each after the regenerated ones before it; a stopped call goes on where it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.chat import Conversation, read_conversations
from dflash.data.regenerate import RegenerateCounts, Regenerator, regenerate, settings_path
from dflash.errors import DataError
from tests.data.conftest import chat

SETTINGS = {"target": "abc", "max_new_tokens": 8}
CHATS = [Conversation(chat(f"q{i}", "old", f"r{i}", "old"), f"f:{i}") for i in range(4)]


class Model:
    """Answers with the number of the call; remembers what it was asked; dies at the call `dies_at`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, end: str = "<|im_end|>", dies_at: int | None = None) -> None:
        self.tokenizer, self.end, self.dies_at, self.asked = tokenizer, end, dies_at, []
        self.offset = 0

    def __call__(self, prompt: list[int]) -> list[int]:
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        self.asked.append(self.tokenizer.decode(prompt))
        ids: list[int] = self.tokenizer(f"new{len(self.asked) + self.offset}{self.end}")["input_ids"]
        return ids


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., RegenerateCounts]:
    def call(chats: list[Conversation] = CHATS, *, model: Model | None = None, **settings: Any) -> RegenerateCounts:
        regenerator = Regenerator(tokenizer, model or Model(tokenizer), frozenset([tokenizer.eos_token_id]))
        return regenerate(regenerator, chats, tmp_path / "out.jsonl", SETTINGS | settings)

    return call


def written(tmp_path: Path) -> list[list[str]]:
    conversations = read_conversations(tmp_path / "out.jsonl")
    return [[m["content"] for m in c.messages if m["role"] == "assistant"] for c in conversations]


def test_every_answer_is_replaced_and_later_ones_see_the_new_earlier_ones(
    tokenizer: PreTrainedTokenizerFast, run: Callable[..., RegenerateCounts], tmp_path: Path
) -> None:
    model = Model(tokenizer)
    counts = run(CHATS[:1], model=model)
    (conversation,) = read_conversations(tmp_path / "out.jsonl")
    assert conversation.messages == chat("q0", "new1", "r0", "new2")
    assert model.asked[0] == "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
    asked = tokenizer.apply_chat_template(chat("q0", "new1", "r0"), add_generation_prompt=True, tokenize=False)
    assert model.asked[1] == asked
    assert "new1<|im_end|>" in asked
    assert counts == RegenerateCounts(done=1, answers=2)


def test_an_answer_without_an_end_token_is_counted_as_cut(
    tokenizer: PreTrainedTokenizerFast, run: Callable[..., RegenerateCounts], tmp_path: Path
) -> None:
    assert run(CHATS[:1], model=Model(tokenizer, end="")).cut == 2
    assert written(tmp_path) == [["new1", "new2"]]


def test_answers_that_become_other_tokens_are_counted(
    tokenizer: PreTrainedTokenizerFast, run: Callable[..., RegenerateCounts]
) -> None:
    letters = [tokenizer(letter)["input_ids"][0] for letter in "parameters"]
    assert tokenizer("parameters")["input_ids"] != letters
    assert run(CHATS[:1], model=lambda prompt: [*letters, tokenizer.eos_token_id]).retokenised == 2


def test_a_conversation_ends_at_the_call_whose_answer_would_belong_to_another(
    run: Callable[..., RegenerateCounts], tmp_path: Path
) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [*chat("q"), calling, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    assert run([Conversation(messages, "f:1", [{"name": "f"}])]).ended_at_tool_call == 1
    (conversation,) = read_conversations(tmp_path / "out.jsonl")
    assert conversation.messages == chat("q", "new1")
    assert conversation.tools == [{"name": "f"}]


@pytest.mark.parametrize("dies_at", range(8))
def test_a_stopped_call_goes_on_and_ends_as_if_never_stopped(
    tokenizer: PreTrainedTokenizerFast, run: Callable[..., RegenerateCounts], tmp_path: Path, dies_at: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(model=Model(tokenizer, dies_at=dies_at))
    finished = dies_at // 2
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == finished
    model = Model(tokenizer)
    model.offset = 2 * finished
    counts = run(model=model)
    assert len(model.asked) == 8 - 2 * finished
    assert (counts.done, counts.skipped) == (4, finished)
    assert written(tmp_path) == [[f"new{2 * i + 1}", f"new{2 * i + 2}"] for i in range(4)]


def test_a_line_torn_by_a_kill_is_written_again(run: Callable[..., RegenerateCounts], tmp_path: Path) -> None:
    run(CHATS[:3])
    out = tmp_path / "out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[:-9])
    counts = run(CHATS[:3])
    assert (counts.skipped, counts.done) == (2, 3)
    assert len(written(tmp_path)) == 3
    assert out.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, -1) + 1])


def test_a_finished_file_asks_the_model_nothing(
    tokenizer: PreTrainedTokenizerFast, run: Callable[..., RegenerateCounts]
) -> None:
    run()
    assert run(model=Model(tokenizer, dies_at=0)) == RegenerateCounts(done=4, skipped=4)


def test_other_settings_are_an_error_and_change_nothing(run: Callable[..., RegenerateCounts], tmp_path: Path) -> None:
    run()
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(DataError, match="same target and token limit, got other settings"):
        run(max_new_tokens=9)
    settings_path(tmp_path / "out.jsonl").unlink()
    with pytest.raises(DataError, match="other settings"):
        run()
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("chats", "line"), [(CHATS[1:], 1), (CHATS[:2] + CHATS[3:], 3), (CHATS[:2], 3)], ids=["first", "third", "fewer"]
)
def test_other_conversations_are_an_error_that_names_the_line(
    run: Callable[..., RegenerateCounts], tmp_path: Path, chats: list[Conversation], line: int
) -> None:
    run()
    with pytest.raises(DataError, match=f"out.jsonl:{line}: expected answers to the same conversations"):
        run(chats)


def test_a_line_that_is_no_answer_is_an_error(run: Callable[..., RegenerateCounts], tmp_path: Path) -> None:
    run()
    with (tmp_path / "out.jsonl").open("a") as out:
        out.write(json.dumps({"messages": []}) + "\n")
    with pytest.raises(DataError, match=r"out.jsonl:5: expected a regenerated conversation"):
        run()


def test_a_conversation_that_the_assistant_begins_is_an_error(run: Callable[..., RegenerateCounts]) -> None:
    with pytest.raises(DataError, match="f:9: expected a question first"):
        run([Conversation(chat("q", "a")[1:], "f:9")])
