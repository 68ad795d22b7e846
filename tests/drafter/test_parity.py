"""The training forward of every block equals the step-by-step forward of decoding."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor

from dflash import parts
from dflash.assets import embedded_path
from dflash.attention.select import Workload, choose
from dflash.command_line import training_config
from dflash.data.documents import Document
from dflash.data.rows import batches, collate
from dflash.drafter.anchors import Anchors, draw_anchors
from dflash.drafter.blocks import PlainRows, Rows, cut_blocks
from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.features import Features, FeatureSource
from dflash.target import Target
from tests.conftest import CORPUS
from tests.drafter.parts import draw, make_drafter, make_features, make_rows

LAYERS = {"full": (None, True), "sliding-causal": (5, True), "sliding-both-ways": (5, False)}
BACKENDS = [("eager", "sdpa"), ("locked-compile", "sdpa"), ("eager", "flex")]


def training_logits(drafter: DFlashDrafter, rows: Rows, features: Features, anchors: Anchors) -> Tensor:
    blocks = cut_blocks(rows, anchors, drafter.block_size, drafter.mask_token_id)
    with torch.no_grad():
        return drafter.logits(drafter.block_hidden(rows, features.hidden, anchors, blocks))


def decoded_logits(drafter: DFlashDrafter, rows: Rows, features: Features, anchors: Anchors) -> Tensor:
    """Each document decoded alone: one cache, fed the features between consecutive anchors."""
    B, N = anchors.position.shape
    out = torch.zeros(B, N, drafter.block_size - 1, drafter.config.vocab_size)
    for row in range(B):
        before = None
        for n in range(N):
            if not anchors.valid[row, n]:
                continue
            anchor = int(anchors.position[row, n])
            document = rows.document_ids[row, anchor]
            first = int((rows.document_ids[row] == document).nonzero()[0])
            if document != before:
                cache, before, taken = drafter.new_cache(), document, first
            block = torch.full((1, drafter.block_size), drafter.mask_token_id)
            block[0, 0] = rows.input_ids[row, anchor]
            new = features.hidden[row : row + 1, taken:anchor]
            out[row, n] = drafter.draft(cache, new, block, anchor - first)[0]
            taken = anchor
    return out


@pytest.mark.parametrize("backend", BACKENDS, ids=["tiles", "locked-compile", "flex"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("lengths", [[[40], [29]], [[17, 9, 12], [20, 3, 15]]], ids=["unpacked", "packed"])
def test_training_logits_of_every_block_equal_step_by_step_decoding(
    lengths: list[list[int]], kind: str, backend: tuple[str, str]
) -> None:
    window, causal = LAYERS[kind]
    drafter = make_drafter(window=window, causal=causal)
    drafter.use_attention(choose(*backend, "cpu", workload=Workload(trains=False)))
    rows = make_rows(lengths, tokens=40)
    features = make_features(rows)
    anchors = draw(rows, drafter)
    trained = training_logits(drafter, rows, features, anchors)
    decoded = decoded_logits(drafter, rows, features, anchors)
    assert int(anchors.valid.sum()) >= 20
    torch.testing.assert_close(trained[anchors.valid], decoded[anchors.valid], atol=1e-4, rtol=0)


def test_a_context_shifted_by_one_token_breaks_the_parity_so_the_comparison_can_fail() -> None:
    drafter = make_drafter()
    rows = make_rows([[40]], tokens=40)
    features = make_features(rows)
    anchors = draw(rows, drafter)
    shifted = Features(features.hidden.roll(1, dims=1), features.last)
    trained = training_logits(drafter, rows, features, anchors)
    decoded = decoded_logits(drafter, rows, shifted, anchors)
    assert (trained - decoded)[anchors.valid].abs().amax() > 1e-2


@pytest.mark.parametrize("window", [None, 7])
def test_parity_holds_on_text_packed_by_the_data_pipeline_with_a_real_targets_features(
    tiny_target_dir: object, window: int | None
) -> None:
    target = Target.load(tiny_target_dir, torch.float32, "cpu")  # type: ignore[arg-type]
    config = create_drafter_config(target.config, 2, window)
    config.initializer_range = 0.1
    drafter = DFlashDrafter(config, [1, 3], 8, 16, int(target.tokenizer.mask_token_id))
    drafter.bind_target(target.embedding, target.head)
    texts = [target.tokenizer(text)["input_ids"] for text in CORPUS]
    documents = [
        Document(i, torch.tensor(ids, dtype=torch.int32).numpy(), torch.ones(len(ids), dtype=torch.bool).numpy())
        for i, ids in enumerate(texts)
    ]
    batch = collate([documents[:2], documents[2:]], 128, int(target.tokenizer.pad_token_id))
    hidden = torch.zeros(2, 128, 2, target.hidden_size)
    for row, at, document in ((0, 0, 0), (0, len(texts[0]), 1), (1, 0, 2), (1, len(texts[2]), 3)):
        ids = torch.tensor(texts[document])
        hidden[row, at : at + len(ids)] = target.features(ids, [1, 3]).hidden
    features = Features(hidden, hidden[:, :, 0])
    anchors = draw_anchors(
        batch.loss_mask, batch.document_ids, batch.doc_ids, block_size=8, max_anchors=16, seed=0, epoch=0
    )
    trained = training_logits(drafter, batch, features, anchors)
    decoded = decoded_logits(drafter, batch, features, anchors)
    torch.testing.assert_close(trained[anchors.valid], decoded[anchors.valid], atol=1e-4, rtol=0)


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("window", [None, 24], ids=["full", "sliding"])
def test_parity_holds_on_conversations_of_the_embedded_target(window: int | None, pack: bool) -> None:
    config = training_config(["--preset", "tiny", "--device", "cpu"], prog="test")
    config = replace(config, drafter=replace(config.drafter, sliding_window=window))
    config = replace(config, data=replace(config.data, train=str(embedded_path("heldout.jsonl")), pack=pack))
    built = parts.build(config)
    drafter = built.drafter
    source = FeatureSource(built.target, None, "online", list(drafter.target_layer_ids))
    for batch in islice(batches(built.store, config.data, config.seed), 2):
        features = source.rows(batch)
        anchors = draw_anchors(
            batch.loss_mask, batch.document_ids, batch.doc_ids, block_size=8, max_anchors=64, seed=0, epoch=0
        )
        trained = training_logits(drafter, batch, features, anchors)
        decoded = decoded_logits(drafter, batch, features, anchors)
        assert int(anchors.valid.sum()) > 10
        torch.testing.assert_close(trained[anchors.valid], decoded[anchors.valid], atol=1e-4, rtol=0)


def test_a_block_does_not_depend_on_the_other_documents_of_its_row_nor_on_other_blocks() -> None:
    drafter = make_drafter()
    rows = make_rows([[20, 20]], tokens=40)
    features = make_features(rows)
    anchors = draw(rows, drafter)
    base = training_logits(drafter, rows, features, anchors)
    changed = features.hidden.clone()
    changed[:, 20:] += 1.0
    tokens = rows.input_ids.clone()
    tokens[:, 20:] = (tokens[:, 20:] + 1) % 60
    other = PlainRows(tokens, rows.loss_mask, rows.position_ids, rows.document_ids)
    after = training_logits(drafter, other, Features(changed, features.last), anchors)
    first = anchors.valid & (anchors.position < 20)
    assert first.sum() >= 3
    assert torch.equal(base[first], after[first])
    assert not torch.allclose(base[anchors.valid & ~first], after[anchors.valid & ~first])


def test_positions_past_max_position_embeddings_decode_as_they_train() -> None:
    drafter = make_drafter(max_anchors=4)
    rows = make_rows([[200]], tokens=200)
    features = make_features(rows)
    anchors = Anchors(torch.tensor([[3, 70, 150, 190]]), torch.ones(1, 4, dtype=torch.bool))
    assert drafter.config.max_position_embeddings < 150
    trained = training_logits(drafter, rows, features, anchors)
    torch.testing.assert_close(trained, decoded_logits(drafter, rows, features, anchors), atol=1e-4, rtol=0)
