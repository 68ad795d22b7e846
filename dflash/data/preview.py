"""The loss mask shown to a person: what the assistant says stands out, in colour or, without colours, in brackets."""

from collections.abc import Iterable
from itertools import islice, pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from dflash.data.chat import Conversation
from dflash.data.template import Encoder

SUPERVISED, CONTEXT, CUT = "bold green", "dim", "strike red"
# control characters would drive the terminal; newline and tab are harmless
VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def preview(encoder: Encoder, conversations: Iterable[Conversation], n: int, console: Console) -> None:
    """Prints the first n conversations with their loss mask and the share of supervised tokens; counts nothing.

    Raises DataError as encoding does.
    """
    for conversation in islice(conversations, n):
        ids, mask = encoder.encode_untouched(conversation)
        limit = encoder.options.row_tokens
        cut = f", cut at {limit}" if len(ids) > limit else ""
        share = mask[:limit].mean() if len(ids) else 0.0
        title = Text(f"{conversation.source}  {len(ids)} tokens{cut}, {100 * share:.0f} % supervised", style="bold")
        console.print(title, soft_wrap=True)
        console.print(_painted(encoder, ids, mask, colours=console.color_system is not None), soft_wrap=True)


def _painted(encoder: Encoder, ids: np.ndarray, mask: np.ndarray, *, colours: bool) -> Text:
    """Runs of equal colour are decoded together, so that characters of several tokens stay whole."""
    limit = encoder.options.row_tokens
    kinds = np.where(np.arange(len(ids)) >= limit, 2, mask.astype(int))
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)] if len(ids) else [0]
    text = Text()
    for start, end in pairwise(edges):
        words = encoder.tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False).translate(VISIBLE)
        before, after = (("", ""), ("[[", "]]"), ("~~", "~~"))[kinds[start]] if not colours else ("", "")
        text.append(f"{before}{words}{after}", style=(CONTEXT, SUPERVISED, CUT)[kinds[start]])
    return text
