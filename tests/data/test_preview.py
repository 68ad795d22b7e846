"""A preview shows which words are supervised, with colours and without."""

import io

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from dflash.data.chat import Conversation
from dflash.data.preview import preview
from dflash.data.template import EncodeCounts, Encoder
from tests.data.conftest import chat


def shown(
    tokenizer: PreTrainedTokenizerFast, *turns: str, row_tokens: int = 512, colours: bool = False, n: int = 9
) -> str:
    out = io.StringIO()
    console = Console(file=out, color_system="truecolor" if colours else None, force_terminal=colours, width=40)
    encoder = Encoder(tokenizer, row_tokens)
    preview(encoder, [Conversation(chat(*turns), "f:1"), Conversation(chat("x", "y"), "f:2")], n, console)
    assert encoder.counts == EncodeCounts()
    return out.getvalue()


def test_without_colours_the_supervised_words_are_in_brackets(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = "an answer \U0001f642 longer than the forty columns of this terminal"
    text = shown(tokenizer, "q [bold] é", answer, "r", "b")
    assert "user\nq [bold] é<|im_end|>" in text
    assert f"[[{answer}<|im_end|>]]" in text
    assert "[[b<|im_end|>]]" in text
    assert text.count("[[") == 3


def test_with_colours_the_answer_stands_out_and_nothing_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    text = shown(tokenizer, "q", "an answer", colours=True)
    assert "\x1b[1;32man answer<|im_end|>\x1b[0m" in text
    assert "[[" not in text
    assert "\x1b[1;32mq" not in text


def test_the_number_asked_for_is_shown_with_source_and_share(tokenizer: PreTrainedTokenizerFast) -> None:
    assert "f:2" in shown(tokenizer, "q", "a", n=2)
    one = shown(tokenizer, "q", "a", n=1)
    assert "f:2" not in one
    assert "f:1  14 tokens, 14 % supervised" in one


def test_what_a_row_has_no_room_for_is_struck_out(tokenizer: PreTrainedTokenizerFast) -> None:
    text = shown(tokenizer, "q", "abcdefgh", row_tokens=14)
    assert "cut at 14" in text
    assert "[[ab]]~~cdefgh<|im_end|>~~" in text
    assert "~~" not in shown(tokenizer, "q", "abcdefgh")


def test_control_characters_do_not_reach_the_terminal(tokenizer: PreTrainedTokenizerFast) -> None:
    text = shown(tokenizer, "red \x1b[31m \0 \x7f \x9b1m", "a")
    assert not set(text) & {"\x1b", "\0", "\x7f", "\x9b"}
    assert "red \u241b[31m \u2400 \u2421 \ufffd1m" in text
