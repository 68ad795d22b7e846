"""The feature store gives back the target's bits, or says in one line why it cannot."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash.errors import DataError, OutputError
from dflash.feature_store import FeatureStore, ids_hash
from dflash.features import Features, FeatureSource
from dflash.target import Target
from tests.conftest import TargetMaker
from tests.test_decode import load

LAYERS = [1, 4]
DOCUMENTS = {7: [5, 9, 33, 120, 8], 2: [11, 12, 13], 40: [200, 201, 5, 5, 5, 5, 17], 3: [44]}


@dataclass(frozen=True)
class Rows:
    input_ids: Tensor
    document_ids: Tensor
    doc_ids: tuple[tuple[int, ...], ...]


def packed(rows: list[list[int]], T: int = 16) -> Rows:
    input_ids, document_ids = torch.zeros(len(rows), T, dtype=torch.long), torch.full((len(rows), T), -1)
    for r, names in enumerate(rows):
        at = 0
        for number, name in enumerate(names):
            tokens = torch.tensor(DOCUMENTS[name])
            input_ids[r, at : at + len(tokens)], document_ids[r, at : at + len(tokens)] = tokens, number
            at += len(tokens)
    return Rows(input_ids, document_ids, tuple(tuple(names) for names in rows))


def same(a: Features, b: Features) -> bool:
    return torch.equal(a.hidden, b.hidden) and torch.equal(a.last, b.last)


def random_features(n_tokens: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(torch.randn(n_tokens, 2, 8, generator=generator), torch.randn(n_tokens, 8, generator=generator))


def small_store(directory: Path, shard_bytes: int = 1) -> FeatureStore:
    return FeatureStore(directory, "f" * 64, LAYERS, torch.float32, 384, shard_bytes)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_online_cache_and_offline_features_are_bit_equal_whatever_the_packing(
    make_target_dir: TargetMaker, tmp_path: Path, kind: str
) -> None:
    target = load(make_target_dir, kind)
    batch, other = packed([[7, 2], [40]]), packed([[2, 40], [7]])
    online = FeatureSource(target, None, "online", LAYERS).rows(batch)
    with FeatureStore.for_target(tmp_path / "store", target, LAYERS) as store:
        source = FeatureSource(target, store, "cache", LAYERS)
        assert same(source.rows(batch), online)
        assert same(source.rows(batch), online)
    reopened = FeatureStore.for_target(tmp_path / "store", target, LAYERS)
    assert len(reopened) == 3
    offline = FeatureSource(None, reopened, "offline", LAYERS)
    assert same(offline.rows(batch), online)
    repacked = offline.rows(other)
    assert torch.equal(repacked.hidden[1, :5], online.hidden[0, :5])
    assert torch.equal(repacked.hidden[0, :3], online.hidden[0, 5:8])
    assert not online.hidden[0, 8:].any()
    assert not online.last[0, 8:].any()


def test_documents_of_a_packed_row_do_not_see_each_other(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    rows = FeatureSource(target, None, "online", LAYERS).rows(packed([[7, 2]]))
    together = target.features(torch.tensor(DOCUMENTS[7] + DOCUMENTS[2]), LAYERS)
    assert torch.equal(rows.hidden[0, 5:8], target.features(torch.tensor(DOCUMENTS[2]), LAYERS).hidden)
    assert not torch.allclose(rows.hidden[0, 5:8], together.hidden[5:], atol=1e-2)


def test_offline_never_runs_the_target(make_target_dir: TargetMaker, tmp_path: Path) -> None:
    target = load(make_target_dir)
    store = FeatureStore.for_target(tmp_path, target, LAYERS)
    source = FeatureSource(target, store, "offline", LAYERS)
    with pytest.raises(DataError, match=r"document 7.*cache"):
        source.rows(packed([[7]]))


def test_cached_features_are_read_and_not_computed_again(
    make_target_dir: TargetMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(make_target_dir)
    source = FeatureSource(target, FeatureStore.for_target(tmp_path, target, LAYERS), "cache", LAYERS)
    source.rows(packed([[7, 2]]))
    monkeypatch.setattr(Target, "features", lambda *_: pytest.fail("computed again"))
    source.rows(packed([[2], [7]]))


def test_bfloat16_features_come_back_bit_equal(tmp_path: Path) -> None:
    made = Features(*(x.bfloat16() for x in (random_features(5, 0).hidden, random_features(5, 0).last)))
    with FeatureStore(tmp_path, "x", LAYERS, torch.bfloat16, 384) as store:
        store.put(1, "h", made)
    assert same(FeatureStore(tmp_path, "x", LAYERS, torch.bfloat16, 384).get(1, "h"), made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 400}, "vocab_size 400, got 384"),
        ({"layer_ids": [4, 1]}, r"layer_ids \[4, 1\], got \[1, 4\]"),
        ({"target_fingerprint": "e" * 64}, "target eeee"),
        ({"dtype": torch.bfloat16}, "dtype bfloat16, got float32"),
    ],
)
def test_a_store_of_another_vocabulary_target_layer_or_dtype_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    small_store(tmp_path)
    right = {"target_fingerprint": "f" * 64, "layer_ids": LAYERS, "dtype": torch.float32, "vocab_size": 384}
    FeatureStore(tmp_path, **right)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        FeatureStore(tmp_path, **(right | change))  # type: ignore[arg-type]


def test_features_of_other_tokens_are_refused(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    store.put(1, ids_hash(torch.tensor([1, 2])), random_features(2, 0))
    for read in (store, small_store(tmp_path)):
        with pytest.raises(DataError, match="other tokens"):
            read.get(1, ids_hash(torch.tensor([1, 3])))


def shard_of(directory: Path) -> Path:
    with small_store(directory) as store:
        store.put(1, "h", random_features(6, 0))
    return next(directory.glob("shard-*"))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    shard = shard_of(tmp_path)
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(DataError, match=shard.name) as error:
        small_store(tmp_path)
    assert "\n" not in str(error.value)


def test_a_flipped_bit_is_noticed_when_read(tmp_path: Path) -> None:
    shard = shard_of(tmp_path)
    assert same(small_store(tmp_path).get(1, "h"), random_features(6, 0))
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="checksum of document 1"):
        small_store(tmp_path).get(1, "h")


def test_an_unreadable_meta_file_is_named(tmp_path: Path) -> None:
    small_store(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json"):
        small_store(tmp_path)


def test_checking_a_store_writes_nothing_and_wants_it_filled(make_target_dir: TargetMaker, tmp_path: Path) -> None:
    target = load(make_target_dir)
    with pytest.raises(DataError, match="fill it first"):
        FeatureStore.check(tmp_path / "none", target, LAYERS)
    assert list(tmp_path.iterdir()) == []
    FeatureStore.for_target(tmp_path / "empty", target, LAYERS)
    with pytest.raises(DataError, match="an empty one"):
        FeatureStore.check(tmp_path / "empty", target, LAYERS)
    with FeatureStore.for_target(tmp_path / "full", target, LAYERS) as store:
        FeatureSource(target, store, "cache", LAYERS).rows(packed([[7]]))
    FeatureStore.check(tmp_path / "full", target, LAYERS)


WRITER = """
    import sys, torch
    from pathlib import Path
    from dflash.feature_store import FeatureStore
    from dflash.features import Features
    store = FeatureStore(Path(sys.argv[1]), "f" * 64, [1, 4], torch.float32, 384, shard_bytes=1)
    for i in range(10_000):
        draw = torch.Generator().manual_seed(i)
        store.put(i, str(i), Features(torch.randn(200, 2, 8, generator=draw), torch.randn(200, 8, generator=draw)))
        print(i, flush=True)
"""


def start_writer(directory: Path, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(directory)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_store_whose_writer_was_killed_holds_every_shard_that_was_finished(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    assert writer.stdout is not None
    written = [int(writer.stdout.readline()) for _ in range(12)]
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    store = small_store(tmp_path)
    assert len(store) >= len(written)
    for i in written:
        assert same(store.get(i, str(i)), random_features(200, i))
    store.put(99_999, "new", random_features(3, 1))
    assert same(small_store(tmp_path).get(99_999, "new"), random_features(3, 1))


def test_a_shard_cut_in_the_middle_of_writing_never_gets_its_name(tmp_path: Path) -> None:
    partial = tmp_path / ".partial-0000-shard-00000000-00000000.safetensors"
    small_store(tmp_path)
    partial.write_bytes(shard_of(tmp_path).read_bytes()[:50])
    assert len(small_store(tmp_path)) == 1
    assert partial.exists()  # another process may be writing it
    os.utime(partial, (0, 0))
    assert len(small_store(tmp_path)) == 1
    assert not partial.exists()


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(tmp_path: Path) -> None:
    def limit_file_size() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    small_store(tmp_path)
    writer = start_writer(tmp_path, preexec_fn=limit_file_size)
    _, errors = writer.communicate(timeout=120)
    assert writer.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert "OutputError" in last
    assert "no space left" in last
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]


def test_a_directory_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        small_store(tmp_path / "file" / "store")


def test_shards_are_written_when_the_buffer_is_full_and_on_close(tmp_path: Path) -> None:
    nbytes = random_features(10, 0).hidden.nbytes + random_features(10, 0).last.nbytes
    with small_store(tmp_path, shard_bytes=2 * nbytes) as store:
        for i in range(5):
            store.put(i, str(i), random_features(10, i))
        assert len(list(tmp_path.glob("shard-*"))) == 2
        assert len(small_store(tmp_path)) == 4
        assert len(store) == 5
    assert len(small_store(tmp_path)) == 5
    assert json.loads((tmp_path / "meta.json").read_text())["layer_ids"] == LAYERS
