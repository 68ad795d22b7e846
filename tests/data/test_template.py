"""Tokens and loss mask come from the chat template: assistant's words only, as inference would see them."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dflash.data.chat import Conversation
from dflash.data.documents import Document
from dflash.data.template import ENCODE_BATCH, EncodeCounts, Encoder, prompt_ids, template_sha256, vocabulary_sha256
from dflash.errors import DataError, TargetError
from tests.conftest import CHAT_TEMPLATE
from tests.data.conftest import Messages, chat

PLAIN_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# as reasoning models do: only the last answer keeps its thoughts; tools are offered in a system turn
THINKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACRO_TEMPLATE = (
    "{% macro say(text) %}<|im_start|>assistant\n"
    "{% generation %}{{ text }}<|im_end|>{% endgeneration %}\n{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ say(m.content) }}"
    "{% else %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages, **options: Any) -> Document:
    document = Encoder(tokenizer, options.pop("row_tokens", 512), **options).encode(messages)
    assert document is not None
    return document


def spoken(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """The texts of the supervised runs."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.loss_mask, [False]])))
    return [tokenizer.decode(document.input_ids[a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("mask_from", ["template", "prefix"])
def test_only_the_assistants_words_and_its_end_token_are_supervised(
    tokenizer: PreTrainedTokenizerFast, mask_from: str
) -> None:
    turns = chat("hé \U0001f642?", "answer é\U0001f642", "two", "four words")
    messages = [{"role": "system", "content": "assistant\n"}, *turns]
    document = encode(tokenizer, messages, mask_from=mask_from)
    assert spoken(tokenizer, document) == ["answer é\U0001f642<|im_end|>", "four words<|im_end|>"]
    assert document.input_ids.dtype == np.int32
    assert document.loss_mask.dtype == np.bool_


def test_the_users_copy_of_an_answer_is_not_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    """A search for the answer's text, or for the role's name, would find the user's first."""
    document = encode(tokenizer, chat("say assistant\nyes<|im_end|>", "yes"))
    assert spoken(tokenizer, document) == ["yes<|im_end|>"]
    alike = np.isin(document.input_ids, document.input_ids[document.loss_mask])
    assert document.loss_mask.sum() < alike.sum()


def test_thoughts_are_supervised_where_the_template_shows_them(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    messages = chat("q", "a", "r", "b")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "one", "two"
    expected = ["a<|im_end|>", "<think>\ntwo\n</think>\n\nb<|im_end|>"]
    assert spoken(tokenizer, encode(tokenizer, messages)) == expected
    tokenizer.chat_template = THINKING_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert spoken(tokenizer, encode(tokenizer, messages, mask_from="prefix")) == expected


def test_tool_calls_are_supervised_and_tool_answers_are_not(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = THINKING_TEMPLATE
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*chat("q"), turn, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    document = Encoder(tokenizer, 512).encode(messages, tools)
    assert document is not None
    called = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert spoken(tokenizer, document) == [called, "four<|im_end|>"]
    assert tokenizer.decode(document.input_ids).startswith("<|im_start|>system\nTools: [{")


@pytest.mark.parametrize("bos", [False, True])
def test_tokens_are_those_inference_would_see(tokenizer: PreTrainedTokenizerFast, bos: bool) -> None:
    """The prompt as generation gets it, then the answer; a start token only where the template writes it."""
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
        tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    messages = chat("first", "one", "second", "two")
    document = encode(tokenizer, messages)
    (prompt,) = prompt_ids(tokenizer, [Conversation(messages)])
    assert document.input_ids[: len(prompt)].tolist() == prompt
    assert not document.loss_mask[: len(prompt)].any()
    assert document.loss_mask[len(prompt)]
    later = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert document.input_ids[: len(later)].tolist() == later
    assert tokenizer.decode(document.input_ids).count("<|bos|>") == int(bos)


def test_an_answer_that_grows_together_with_the_prompt_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    """The tokenizer joins the prompt's last and the answer's first characters, which generation cannot."""
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant: qui").replace(
        "<|im_start|>{{ m['role'] }}\n", "<|im_start|>{{ m['role'] }}{{ '\n' if m['role'] == 'user' else ': qui' }}"
    )
    encoder = Encoder(tokenizer, 512)
    encoder.encode(chat("q", "xx"))
    assert encoder.counts.other_prompt == 0
    encoder.encode(chat("q", "ck brown"))
    assert encoder.counts.other_prompt == 1


def test_a_generation_block_that_transformers_misplaces_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MACRO_TEMPLATE
    with pytest.raises(DataError, match="outside macro and set blocks"):
        Encoder(tokenizer, 512).encode(chat("q", "an answer"), source="f:1")
    assert spoken(tokenizer, encode(tokenizer, chat("q", "an answer"), mask_from="prefix")) == ["an answer<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [PLAIN_TEMPLATE, "{# {% generation %} #}" + PLAIN_TEMPLATE, "{{ '{% generation %}' if false }}" + PLAIN_TEMPLATE],
    ids=["none", "in a comment", "in a string"],
)
def test_a_template_without_generation_blocks_is_an_error(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"marks the assistant's words .* or pass --data.mask-from prefix"):
        Encoder(tokenizer, 512)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{% generation %}", "{%-generation  -%}")
    assert Encoder(tokenizer, 512)


def test_a_tokenizer_without_a_template_or_with_a_broken_one_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TargetError, match="chat template, got one without"):
        Encoder(tokenizer, 512)
    tokenizer.chat_template = "{% generation %}{{ 'open"
    with pytest.raises(TargetError, match="syntax error"):
        Encoder(tokenizer, 512)


def test_the_one_conversation_a_template_rejects_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    check = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    tokenizer.chat_template = check + CHAT_TEMPLATE
    good = [Conversation(chat("q", "a"), f"f:{i}") for i in range(1, 4)]
    assert len(list(Encoder(tokenizer, 512).encode_all(good))) == 3
    with pytest.raises(DataError, match=r"^f:9: .*no bad words"):
        list(Encoder(tokenizer, 512).encode_all([*good, Conversation(chat("bad", "a"), "f:9"), *good]))


@pytest.mark.parametrize("slack", [0, -1])
def test_a_conversation_longer_than_a_row_is_cut_left_out_or_an_error(
    tokenizer: PreTrainedTokenizerFast, slack: int
) -> None:
    messages = chat("q", "a long answer of several words")
    whole = encode(tokenizer, messages)
    rows = len(whole) + slack
    cut, drop = Encoder(tokenizer, rows, "truncate"), Encoder(tokenizer, rows, "drop")
    document = cut.encode(messages)
    assert document is not None
    assert document.input_ids.tolist() == whole.input_ids[:rows].tolist()
    assert document.loss_mask.tolist() == whole.loss_mask[:rows].tolist()
    assert cut.counts == EncodeCounts(kept=1, truncated=-slack)
    assert (drop.encode(messages) is None) == (slack < 0)
    assert drop.counts == EncodeCounts(kept=1 + slack, dropped=-slack)
    if slack:
        with pytest.raises(DataError, match=rf"f:1: expected at most {rows} tokens, got {len(whole)}"):
            Encoder(tokenizer, rows, "error").encode(messages, source="f:1")
    else:
        assert Encoder(tokenizer, rows, "error").encode(messages) is not None


def test_what_is_left_unsupervised_by_the_cut_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = chat("a question of some length", "answer")
    start = int(encode(tokenizer, messages).loss_mask.argmax())
    for tokens, kept in ((start + 1, 0), (start + 2, 1)):  # one supervised token has no neighbour to predict
        encoder = Encoder(tokenizer, tokens)
        assert (encoder.encode(messages) is not None) == bool(kept)
        assert (encoder.counts.kept, encoder.counts.unsupervised) == (kept, 1 - kept)


def test_an_empty_answer_is_left_out_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, 512)
    assert encoder.encode(chat("q", "")) is None
    assert encoder.counts == EncodeCounts(unsupervised=1, empty_turns=1)


@pytest.mark.parametrize(("template", "lost"), [(CHAT_TEMPLATE, 1), (THINKING_TEMPLATE, 0)])
def test_what_the_template_does_not_render_is_counted_and_a_turn_of_nothing_else_is_not_trained_on(
    tokenizer: PreTrainedTokenizerFast, template: str, lost: int
) -> None:
    tokenizer.chat_template = template
    call = {"role": "assistant", "content": " \n", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    answer = {"role": "assistant", "content": "four", "reasoning_content": "hm"}
    messages = [*chat("2+2?"), call, {"role": "tool", "content": "4"}, answer]
    encoder = Encoder(tokenizer, 512)
    document = encoder.encode(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert document is not None
    assert encoder.counts == EncodeCounts(
        kept=1, tools_not_rendered=lost, tool_calls_not_rendered=lost, thoughts_not_rendered=lost, empty_turns=lost
    )
    assert len(spoken(tokenizer, document)) == 2 - lost
    shown, mask = encoder.encode_untouched(Conversation(messages))
    assert np.diff(mask.astype(int)).clip(0).sum() == 2 - lost
    assert len(shown)


def test_a_conversation_without_an_answer_is_an_error_or_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="f:7: expected an assistant's turn, got only user"):
        Encoder(tokenizer, 512).encode(chat("q"), source="f:7")
    encoder = Encoder(tokenizer, 512, no_assistant="drop")
    assert encoder.encode(chat("q")) is None
    assert encoder.counts == EncodeCounts(no_assistant=1)


def test_ids_count_what_is_kept_and_the_order_is_that_of_the_input(tokenizer: PreTrainedTokenizerFast) -> None:
    """Different tools are tokenised apart and come back in their place."""
    tokenizer.chat_template = THINKING_TEMPLATE
    tools = [None, [{"name": "f"}], [{"name": "g"}]]
    chats = [Conversation(chat(f"q{i}", "" if i % 5 == 0 else f"a{i}"), f"f:{i}", tools[i % 3]) for i in range(20)]
    encoder, calls = Encoder(tokenizer, 512), []
    documents = list(encoder.encode_all(chats, lambda done, total: calls.append((done, total)), 20))
    assert [d.source for d in documents] == [f"f:{i}" for i in range(20) if i % 5]
    assert [d.id for d in documents] == list(range(16))
    assert [f"a{d.source[2:]}<|im_end|>" for d in documents] == [spoken(tokenizer, d)[0] for d in documents]
    assert calls == [(20, 20)]
    for document in documents:
        offered, text = tools[int(document.source[2:]) % 3], tokenizer.decode(document.input_ids)
        assert text.count("Tools:") == (offered is not None)
        assert offered is None or f'Tools: [{{"name": "{offered[0]["name"]}"}}]' in text


def test_batches_give_what_single_calls_give(tokenizer: PreTrainedTokenizerFast) -> None:
    chats = [Conversation(chat(f"q{i}" * (i % 7 + 1), f"a{i}" * (i % 5 + 1))) for i in range(ENCODE_BATCH + 9)]
    together = list(Encoder(tokenizer, 512).encode_all(chats))
    alone = [encode(tokenizer, c.messages) for c in chats]
    assert [d.input_ids.tolist() for d in together] == [d.input_ids.tolist() for d in alone]
    assert [d.loss_mask.tolist() for d in together] == [d.loss_mask.tolist() for d in alone]


def test_equal_documents_are_kept_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, 512)
    for answer in ("a", "b", "a", "a"):
        encoder.encode(chat("q", answer))
    assert encoder.counts == EncodeCounts(kept=4, duplicates=2)


def test_a_template_that_rewrites_the_prompt_has_no_prefix_mask(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ messages | length }}" + PLAIN_TEMPLATE
    with pytest.raises(DataError, match=r"f:3: .* only appends, got one that renders the prompt of messages\[1\]"):
        Encoder(tokenizer, 512, mask_from="prefix").encode(chat("q", "a"), source="f:3")


def test_without_an_end_token_a_prefix_answer_ends_where_the_next_turn_begins(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("<|im_end|>", "")
    messages = chat("q", "a", "r", "b")
    assert spoken(tokenizer, encode(tokenizer, messages, mask_from="prefix")) == ["a\n", "b\n"]
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert spoken(tokenizer, encode(tokenizer, messages, mask_from="prefix")) == ["a<|im_end|>", "b<|im_end|>"]


def test_the_users_end_token_is_not_taken_for_the_assistants(tokenizer: PreTrainedTokenizerFast) -> None:
    only_users_end = "{% if m.role == 'user' %}<|im_end|>{% endif %}\n"
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + only_users_end
    ending = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template = turn + ending
    messages = chat("q", "first answer", "r", "last answer")
    assert spoken(tokenizer, encode(tokenizer, messages, mask_from="prefix")) == ["first answer", "last answer"]
    # an answer rendered otherwise when it is the last one: nothing tells where the first one ends
    tokenizer.chat_template = turn + "{% if loop.last %}{{ '!' if m.role == 'assistant' }}{% endif %}" + ending
    with pytest.raises(DataError, match=r"renders the text up to messages\[1\]"):
        Encoder(tokenizer, 512, mask_from="prefix").encode(messages)


def test_fingerprints_change_with_the_vocabulary_and_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary, template = vocabulary_sha256(tokenizer), template_sha256(tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    assert vocabulary_sha256(tokenizer) == vocabulary
    assert template_sha256(tokenizer) != template
    tokenizer.add_tokens(["<|new|>"])
    assert vocabulary_sha256(tokenizer) != vocabulary
