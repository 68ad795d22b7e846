"""`dflash prepare` writes a whole store or nothing, never deletes what is not its own, and says what it did."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from dflash.data import prepare as module
from dflash.data.chat import read_conversations
from dflash.data.documents import DOCUMENTS, META, USED, DocumentStore
from dflash.data.options import PrepareOptions
from dflash.data.prepare import ANSWERS, run_prepare
from dflash.data.template import prompt_ids
from dflash.decode import greedy_generate
from dflash.errors import ConfigError, DataError, OutputError, TargetError, UserError
from dflash.target import Target
from tests.data.conftest import WriteRows, chat

Prepare = Callable[..., DocumentStore | None]
STORE = {DOCUMENTS, USED, META}


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def prepare(tiny_target_dir: Path, write_rows: WriteRows, tmp_path: Path, out: io.StringIO) -> Prepare:
    path = write_rows(*({"messages": chat(f"q{i}", f"answer {i}")} for i in range(4)))
    output = tmp_path / "store"
    defaults = PrepareOptions(str(path), output, str(tiny_target_dir), row_tokens=256, max_new_tokens=6, device="cpu")

    def call(**changes: Any) -> DocumentStore | None:
        return run_prepare(replace(defaults, **changes), Console(file=out, width=200))

    return call


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()} if directory.is_dir() else set()


def test_a_store_is_written_and_its_numbers_are_printed(prepare: Prepare, tmp_path: Path, out: io.StringIO) -> None:
    store = prepare()
    assert store is not None
    assert len(store) == 4
    assert names(tmp_path) == {"chats.jsonl", "store"}
    assert names(tmp_path / "store") == STORE
    words = " ".join(out.getvalue().split())
    assert "encode: 4 conversations" in words
    assert f"tokens {store.meta.tokens} supervised {store.meta.supervised_tokens} (" in words


def test_a_preview_alone_writes_nothing(prepare: Prepare, tmp_path: Path, out: io.StringIO) -> None:
    assert prepare(output=None, preview=2) is None
    assert names(tmp_path) == {"chats.jsonl"}
    assert out.getvalue().count("% supervised") == 2
    assert "[[answer 1<|im_end|>]]" in out.getvalue()


def test_a_limit_keeps_the_first_conversations(prepare: Prepare) -> None:
    store = prepare(limit=3)
    assert store is not None
    assert [d.source.rsplit(":", 1)[1] for d in store] == ["1", "2", "3"]


def test_answers_are_the_targets_own_greedy_text(prepare: Prepare, tiny_target_dir: Path, tmp_path: Path) -> None:
    store = prepare(regenerate=True)
    assert store is not None
    target = Target.load(tiny_target_dir, torch.float32, "cpu")
    for conversation in read_conversations(tmp_path / "store" / ANSWERS):
        (prompt,) = prompt_ids(target.tokenizer, [conversation])
        own = greedy_generate(target, prompt, max_new_tokens=6).tokens
        said = own[:-1] if own[-1] in target.eos_token_ids else own
        assert conversation.messages[1]["content"] == target.tokenizer.decode(said)
    assert names(tmp_path / "store") == {*STORE, ANSWERS, "regenerated.settings.json"}


def test_regenerating_goes_on_after_a_stop(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: io.StringIO
) -> None:
    calls: list[int] = []

    def stopped(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return greedy_generate(*arguments, **options)

    monkeypatch.setattr(module, "greedy_generate", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare(regenerate=True)
    with pytest.raises(OutputError, match="--resume to go on"):
        prepare(regenerate=True)
    store = prepare(regenerate=True, resume=True)
    assert store is not None
    assert len(store) == 4
    assert len(calls) == 3 + 2
    assert "2 were there already" in out.getvalue()
    again = prepare(regenerate=True, overwrite=True)
    assert again is not None
    assert [d.input_ids.tolist() for d in again] == [d.input_ids.tolist() for d in store]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ("{bad", {}, "5: expected a JSON object"),
        ('{"prompt": "q"}', {}, "5: expected an assistant's turn"),
        ('{"prompt": "q"}', {"regenerate": True}, "5: expected an assistant's turn"),
        ('{"prompt": "q", "completion": "%s"}' % ("word " * 200), {"overlong": "error"}, "5: expected at most 256"),
        ('{"text": "q"}', {"preview": 1}, "5: expected a conversation"),
    ],
    ids=["malformed", "no answer", "no answer to regenerate", "too long", "no conversation"],
)
def test_a_bad_row_is_an_error_and_nothing_is_written(
    prepare: Prepare, tmp_path: Path, row: str, options: dict[str, Any], message: str
) -> None:
    with (tmp_path / "chats.jsonl").open("a") as chats:
        chats.write(row + "\n")
    with pytest.raises(DataError, match=message) as caught:
        prepare(**options)
    assert caught.value.exit_code == 2
    assert names(tmp_path) == {"chats.jsonl"}
    assert prepare(limit=4) is not None


def test_a_row_without_an_answer_may_be_left_out(prepare: Prepare, tmp_path: Path, out: io.StringIO) -> None:
    with (tmp_path / "chats.jsonl").open("a") as chats:
        chats.write('{"prompt": "q"}\n')
    store = prepare(no_assistant="drop")
    assert store is not None
    assert len(store) == 4
    assert "no assistant 1" in " ".join(out.getvalue().split())


def test_an_output_in_use_is_refused_and_only_a_store_is_overwritten(prepare: Prepare, tmp_path: Path) -> None:
    prepare()
    with pytest.raises(OutputError, match="an empty directory, got 3 files; pass --overwrite"):
        prepare()
    store = prepare(overwrite=True, limit=2)
    assert store is not None
    assert len(store) == 2
    (tmp_path / "store" / "thesis.tex").touch()
    with pytest.raises(OutputError, match=r"an empty directory or a store, got thesis.tex"):
        prepare(overwrite=True)
    assert names(tmp_path / "store") == {*STORE, "thesis.tex"}
    with pytest.raises(OutputError, match="a directory, got a file"):
        prepare(output=tmp_path / "chats.jsonl", overwrite=True)


def test_the_input_is_never_overwritten(prepare: Prepare, tmp_path: Path) -> None:
    prepare(regenerate=True)
    answers = tmp_path / "store" / ANSWERS
    before = answers.read_bytes()
    for regenerate in (False, True):
        with pytest.raises(OutputError, match="expected --output apart from --data"):
            prepare(data=str(answers), overwrite=True, regenerate=regenerate)
    prepare(overwrite=True)
    assert answers.read_bytes() == before
    assert prepare(data=str(answers), output=tmp_path / "other") is not None


def test_a_full_disk_while_regenerating_is_an_error_that_says_how_to_go_on(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "greedy_generate", full)
    with pytest.raises(OutputError, match="No space left on device; free some space, then go on with --resume"):
        prepare(regenerate=True)
    monkeypatch.undo()
    assert prepare(regenerate=True, resume=True) is not None


def test_overwriting_with_a_bad_input_keeps_the_older_store(prepare: Prepare, tmp_path: Path) -> None:
    prepare()
    (tmp_path / "chats.jsonl").write_text("{bad\n")
    with pytest.raises(DataError):
        prepare(overwrite=True)
    assert len(DocumentStore.open(tmp_path / "store")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": None}, "--output, --preview or both"),
        ({"output": None, "preview": 1, "overwrite": True}, "add --output"),
        ({"resume": True}, "--resume with --regenerate"),
        ({"resume": True, "regenerate": True, "overwrite": True}, "choose one"),
        ({"row_tokens": 1}, "--row-tokens: expected"),
        ({"limit": 0}, "--limit: expected"),
        ({"preview": -1}, "--preview: expected"),
        ({"max_new_tokens": 0}, "--max-new-tokens: expected"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_contradict_each_other_are_an_error(
    prepare: Prepare, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(**options)
    assert names(tmp_path) == {"chats.jsonl"}


def test_a_target_without_a_tokenizer_is_an_error(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such directory"):
        prepare(target=str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="a tokenizer in the model directory") as caught:
        prepare(target=str(tmp_path / "empty"))
    assert "\n" not in str(caught.value)


def test_a_target_whose_template_marks_no_answers_is_an_error_unless_prefixes_are_asked_for(
    prepare: Prepare, tiny_target_dir: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    marked = prepare(output=tmp_path / "marked")
    plain = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.chat_template = plain
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="pass --mask-from prefix"):
        prepare(target=str(tmp_path / "plain"))
    assert "store" not in names(tmp_path)
    prefix = prepare(target=str(tmp_path / "plain"), mask_from="prefix")
    assert marked is not None
    assert prefix is not None
    assert [d.input_ids[d.loss_mask].tolist() for d in prefix] == [d.input_ids[d.loss_mask].tolist() for d in marked]
