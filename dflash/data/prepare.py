"""The verb `dflash prepare`: conversations in, a tokenised store out; with a preview of the mask, or new answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoTokenizer

from dflash.assets import EMBEDDED, embedded_path
from dflash.data.chat import read_conversations
from dflash.data.documents import DOCUMENTS, META, PARTIAL, USED, DocumentStore
from dflash.data.files import find_files
from dflash.data.options import PrepareOptions
from dflash.data.preview import preview
from dflash.data.regenerate import RegenerateCounts, Regenerator, regenerate, settings_path
from dflash.data.template import Encoder
from dflash.decode import greedy_generate
from dflash.errors import ConfigError, OutputError, TargetError
from dflash.parts import resolve_device
from dflash.paths import missing_target
from dflash.ranges import check_ranges
from dflash.target import Target

__all__ = ["PrepareOptions", "prepare", "run_prepare"]
ANSWERS = "regenerated.jsonl"
OWN_FILES = (DOCUMENTS, USED, META, ANSWERS, settings_path(Path(ANSWERS)).name)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_prepare(options: PrepareOptions, console: Console) -> DocumentStore | None:
    """Runs the verb and prints what it did; none when only a preview was asked for. Raises UserErrors."""
    store = prepare(options, console)
    if store is not None:
        console.print(_summary(store))
    return store


def prepare(options: PrepareOptions, console: Console) -> DocumentStore | None:
    """Reads, shows, regenerates and encodes as asked; the store, or none without an output. Raises UserErrors.

    Every row of the input is read once before anything is written; before answers are generated, which takes long,
    every conversation is also put through the template. A bad one leaves nothing behind.
    """
    _check(options)
    path = target_path(options.target)
    encoder = Encoder(
        load_tokenizer(path, trust_remote_code=options.trust_remote_code),
        options.row_tokens,
        options.overlong,
        no_assistant=options.no_assistant,
        mask_from=options.mask_from,
        option_prefix="--",
    )
    if options.output is not None:
        _check_output(options)
    if options.preview:
        preview(encoder, read_conversations(options.data, options.limit), options.preview, console)
    if options.output is None:
        return None
    total = _read_through(options, encoder)
    data: Path | str = options.data
    if options.regenerate:
        data = _regenerate(options, options.output, path, total, console)
    with _bar(console, "encode", total) as advance:
        conversations = read_conversations(data, None if options.regenerate else options.limit)
        documents = encoder.encode_all(conversations, lambda done, _: advance(done))
        return DocumentStore.write(options.output, documents, encoder.meta())


def _read_through(options: PrepareOptions, encoder: Encoder) -> int:
    total = 0
    for conversation in read_conversations(options.data, options.limit):
        total += 1
        if options.regenerate and (conversation.first_answer is not None or options.no_assistant == "error"):
            encoder.speaks(conversation)
            encoder.encode_untouched(conversation)
    return total


def target_path(name: str) -> Path:
    """Directory of a target: the shipped one for "embedded"."""
    return embedded_path("target") if name == EMBEDDED else Path(name)


def load_tokenizer(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model directory, never from the network. Raises TargetError when it has none."""
    where = str(directory)
    if not directory.is_dir():
        raise missing_target(where)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        got = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError("a tokenizer in the model directory", got, "see that it is complete", where=where) from error


def _check(options: PrepareOptions) -> None:
    check_ranges(options)
    if options.output is None and not options.preview:
        raise ConfigError("--output, --preview or both", "neither", "say where the store goes: --output DIR")
    if options.output is None and (options.regenerate or options.resume or options.overwrite):
        raise ConfigError("--output with --regenerate, --resume and --overwrite", "none", "add --output DIR")
    if options.resume and not options.regenerate:
        raise ConfigError("--resume with --regenerate", "--resume alone", "encoding starts afresh: pass --overwrite")
    if options.resume and options.overwrite:
        raise ConfigError("--resume or --overwrite", "both", "choose one")


def _check_output(options: PrepareOptions) -> None:
    """An output directory must be empty, ours to overwrite, or hold answers to go on with."""
    output = Path(options.output or "")
    where = str(output)
    if output.exists() and not output.is_dir():
        raise OutputError("a directory", "a file", "choose another --output", where=where)
    found = {entry.name for entry in output.iterdir()} - {PARTIAL} if output.is_dir() else set()
    if strange := sorted(found - set(OWN_FILES)):
        raise OutputError("an empty directory or a store", f"{strange[0]}", "choose another --output", where=where)
    if any(file.resolve().is_relative_to(output.resolve()) for file in find_files(options.data)):
        raise OutputError("--output apart from --data", "the data in it", "choose another --output", where=where)
    if found and not (options.resume or options.overwrite):
        remedy = "pass --overwrite, or --resume to go on regenerating"
        raise OutputError("an empty directory", f"{len(found)} files", remedy, where=where)


def _regenerate(options: PrepareOptions, output: Path, path: Path, total: int, console: Console) -> Path:
    device = resolve_device(options.device)
    target = Target.load(path, DTYPES[options.dtype], device, options.trust_remote_code)
    regenerator = Regenerator(
        target.tokenizer,
        lambda prompt: greedy_generate(target, prompt, max_new_tokens=options.max_new_tokens).tokens,
        target.eos_token_ids,
    )
    settings = {"target": target.fingerprint, "dtype": options.dtype, "max_new_tokens": options.max_new_tokens}
    conversations = read_conversations(options.data, options.limit)
    try:
        if options.overwrite:
            for name in OWN_FILES:
                (output / name).unlink(missing_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        with _bar(console, "regenerate", total) as advance:
            counts = regenerate(regenerator, conversations, output / ANSWERS, settings, advance)
    except OSError as error:
        got, remedy = str(error.strerror or error), "free some space, then go on with --resume"
        raise OutputError("a directory that takes the answers", got, remedy, where=str(output)) from error
    console.print(_answers_line(counts), soft_wrap=True)
    return output / ANSWERS


@contextmanager
def _bar(console: Console, stage: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, a line at the end elsewhere; gives the function that moves it."""
    columns = (TextColumn(stage), BarColumn(30), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(stage, total=total)
        yield lambda done: progress.update(task, completed=done)
    if not console.is_terminal:
        console.print(f"{stage}: {total} conversations", highlight=False)


def _answers_line(counts: RegenerateCounts) -> str:
    return (
        f"regenerated {counts.answers} answers in {counts.done - counts.skipped} conversations "
        f"({counts.skipped} were there already); {counts.cut} stopped at the token limit, "
        f"{counts.ended_at_tool_call} conversations end at a tool call, {counts.retokenised} answers tokenise otherwise"
    )


def _summary(store: DocumentStore) -> Table:
    meta = store.meta
    table = Table(show_header=False, box=None)
    rows: list[tuple[str, object]] = [
        ("store", store.where),
        ("documents", meta.documents),
        ("tokens", meta.tokens),
        ("supervised", f"{meta.supervised_tokens} ({100 * meta.supervised_tokens / max(1, meta.tokens):.1f} %)"),
        ("longest", f"{int(store.lengths.max())} of {meta.row_tokens} tokens"),
    ]
    rows += [(name.replace("_", " "), number) for name, number in meta.counts.items() if number and name != "kept"]
    for name, value in rows:
        table.add_row(name, str(value))
    return table
