"""Checks of the data: how much of it is trained on, what was lost, and whether the target would have said it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from dflash.agreement import target_agreement
from dflash.data.documents import Document, DocumentStore
from dflash.data.prompts import heldout_prompts
from dflash.data.rows import Batch, batches
from dflash.doctor.base import Check, Subject, failed, passed, warned
from dflash.drafter.anchors import draw_anchors

# documents looked at where all of them would take too long, and batches whose anchors are drawn
LOOKED_AT, BATCHES = 512, 8
AGREEMENT_DOCUMENTS = 16
LOST, SUPERVISED, AGREES, FILLED = 0.05, 0.05, 0.8, 0.25


def checks(subject: Subject) -> Iterator[Check]:
    """Counts first, then the anchors that a run would draw, then the target's own opinion."""
    store = subject.store
    yield supervised_check(store.meta.supervised_tokens, store.meta.tokens, len(store))
    yield from lost_checks(store.meta.counts)
    yield mask_token_check(subject)
    yield anchors_check(*_anchors(subject), subject.config.drafter.max_anchors)
    prompts = heldout_prompts(subject.config.data.heldout, subject.target.tokenizer)
    yield heldout_check(prompts, list(islice(store, LOOKED_AT)))
    yield agreement_check(target_agreement(subject.target, store, AGREEMENT_DOCUMENTS))


def supervised_check(supervised: int, tokens: int, documents: int) -> Check:
    """The share of tokens that an assistant said."""
    share = supervised / max(1, tokens)
    found = f"{100 * share:.1f} % of {tokens} tokens in {documents} documents"
    if share < SUPERVISED:
        return warned("supervised", found, "look at the loss mask: dflash prepare --preview 3")
    return passed("supervised", found)


def lost_checks(counts: Mapping[str, int]) -> Iterator[Check]:
    """Conversations that are cut, left out or odd; a store knows what became of each."""
    left_out = ("dropped", "no_assistant", "unsupervised")
    total = counts.get("kept", 0) + sum(counts.get(name, 0) for name in left_out)
    for name, key, remedy in (
        ("truncated", "truncated", "raise --data.row-tokens, or --data.overlong drop"),
        ("left out: too long", "dropped", "raise --data.row-tokens"),
        ("left out: no answer", "no_assistant", "check the roles in the data"),
        ("empty masks", "unsupervised", "their answers begin after row-tokens, or are empty: raise --data.row-tokens"),
        ("duplicates", "duplicates", "remove them: they are trained on as often as they occur"),
        ("other prompt", "other_prompt", "use the target's own chat template: inference would see other tokens"),
    ):
        yield _lost(name, counts.get(key, 0), total, remedy)


def _lost(name: str, count: int, total: int, remedy: str) -> Check:
    found = f"{count} of {total} conversations"
    return warned(name, found, remedy) if count > LOST * total else passed(name, found)


def mask_token_check(subject: Subject) -> Check:
    """The mask token must not occur in the data; DataError says where it does."""
    subject.store.check_mask_token(subject.drafter.mask_token_id)
    return passed("mask token in data", "never")


def anchors_check(drawn: int, offered: int, empty: int, looked_at: int, most: int) -> Check:
    """Blocks that were drawn of those there is room for; padded blocks cost time and teach nothing."""
    share = drawn / max(1, offered)
    found = f"{100 * share:.0f} % of {most} blocks a row are filled, {empty} of {looked_at} batches have none"
    if drawn == 0:
        return failed("anchors", found, "answers are shorter than a block: lower --drafter.block-size")
    if empty > LOST * looked_at:
        return warned("anchors", found, "lower --drafter.block-size, or pack rows (--data.pack)")
    if share < FILLED:
        fitting = max(1, round(1.5 * most * share))
        return warned("anchors", found, f"padded blocks take time: set --drafter.max-anchors to about {fitting}")
    return passed("anchors", found)


def heldout_check(prompts: Sequence[Sequence[int]], documents: Sequence[Document]) -> Check:
    """Held-out prompts that are trained on measure memory, not acceptance."""
    by_length: dict[int, set[tuple[int, ...]]] = {}
    for prompt in prompts:
        by_length.setdefault(len(prompt), set()).add(tuple(prompt))
    seen = {
        start
        for document in documents
        for length, known in by_length.items()
        if (start := tuple(document.input_ids[:length].tolist())) in known
    }
    if not prompts:
        return failed("held out", "no prompt", "name a file of conversations: --data.heldout FILE")
    found = f"{len(seen)} of {len(prompts)} prompts occur in the first {len(documents)} training documents"
    if seen:
        return warned("held out", found, "take other conversations for --data.heldout")
    return passed("held out", found)


def agreement_check(share: float) -> Check:
    """How much of the answers the target would have said itself."""
    found = f"the target's own choice is {100 * share:.0f} % of the supervised tokens"
    if share < AGREES:
        remedy = "let the target answer: dflash prepare --regenerate (arXiv 2602.06036, section 4.1)"
        return warned("teacher agreement", found, remedy)
    return passed("teacher agreement", found)


def _anchors(subject: Subject) -> tuple[int, int, int, int]:
    """Blocks drawn, blocks there is room for, batches without any, batches looked at; of the first epoch."""
    config, drafter = subject.config, subject.drafter
    drawn = offered = empty = looked_at = 0
    for batch in islice(_epoch(subject.store, subject), BATCHES):
        anchors = draw_anchors(
            batch.loss_mask,
            batch.document_ids,
            batch.doc_ids,
            block_size=drafter.block_size,
            max_anchors=drafter.max_anchors,
            seed=config.seed,
            epoch=0,
        )
        count = int(anchors.valid.sum())
        drawn, offered = drawn + count, offered + anchors.valid.numel()
        empty, looked_at = empty + (count == 0), looked_at + 1
    return drawn, offered, empty, looked_at


def _epoch(store: DocumentStore, subject: Subject) -> Iterator[Batch]:
    return batches(store, subject.config.data, subject.config.seed, epochs=1)
