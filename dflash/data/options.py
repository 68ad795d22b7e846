"""The options of `dflash prepare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PrepareOptions:
    """Conversations into a tokenised store, with the loss mask shown or the answers generated anew."""

    # JSONL or Parquet file, glob pattern, directory of such files, or saved `datasets` directory
    data: str
    # directory of the store: the only place that is written to; none: nothing is written, only the preview is shown
    output: Path | None = None
    # directory of the Hugging Face causal LM whose tokenizer and chat template are used, or "embedded"
    target: str = "embedded"
    # longest document, in tokens
    row_tokens: int = 3072
    # a conversation longer than row_tokens: cut, leave out, or stop
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    # a conversation in which the assistant never speaks: stop, or leave out
    no_assistant: Literal["error", "drop"] = "error"
    # where the loss mask comes from: the chat template's generation blocks, or the prompt rendered before each answer
    mask_from: Literal["template", "prefix"] = "template"
    # conversations read; none: all
    limit: int | None = None
    # conversations whose loss mask is shown
    preview: int = 0
    # replace every answer by what the target says (greedy), kept in <output>/regenerated.jsonl
    regenerate: bool = False
    # most tokens of a regenerated answer
    max_new_tokens: int = 1024
    # device that regenerates: cpu, cuda, cuda:N, or auto (cuda when there is one)
    device: str = "auto"
    # dtype that regenerates
    dtype: Literal["float32", "bfloat16"] = "float32"
    # run Python code that comes with the target directory; never turned on by dflash itself
    trust_remote_code: bool = False
    # go on with answers that an earlier, stopped call began to regenerate
    resume: bool = False
    # replace the store in `output`, with --regenerate also the answers; other files are never touched
    overwrite: bool = False
