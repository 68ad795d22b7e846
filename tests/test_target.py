"""The target gives the features transformers would, its own head, and one clear line when it cannot be used."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash.errors import ConfigError, DataError, TargetError
from dflash.target import (
    Target,
    check_layer_ids,
    choose_layer_ids,
    fingerprint,
    load_target_config,
    resolve_mask_token,
)
from tests.conftest import TargetMaker, build_target
from tests.test_decode import FAMILIES, load

IDS = torch.tensor([5, 9, 33, 120, 8, 8, 301, 12, 77, 5, 9])


@pytest.mark.parametrize("kind", FAMILIES)
def test_feature_i_is_hidden_states_i_plus_1_and_last_is_normed_once(make_target_dir: TargetMaker, kind: str) -> None:
    target = load(make_target_dir, kind)
    ids = list(range(target.n_layers))
    features = target.features(IDS, ids)
    with torch.no_grad():
        whole = target.model(IDS[None], output_hidden_states=True)
        states = whole.hidden_states
        assert features.hidden.shape == (len(IDS), target.n_layers, target.hidden_size)
        for i in ids[:-1]:
            assert torch.equal(features.hidden[:, i], states[i + 1][0])
            assert not torch.equal(features.hidden[:, i], states[i][0])
        # transformers' own last entry is already normed: ours is the raw output, and `last` the normed one
        raw = features.hidden[:, -1]
        assert not torch.allclose(raw, states[-1][0], atol=1e-2)
        norm = target.backbone.norm
        assert torch.equal(norm(raw), features.last)
        assert torch.equal(features.last, states[-1][0])
        assert not torch.allclose(norm(features.last), features.last, atol=1e-2)
        torch.testing.assert_close(target.logits(features.last), whole.logits[0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(target.logits(raw), whole.logits[0], atol=1e-1)
        assert not torch.allclose(target.logits(norm(features.last)), whole.logits[0], atol=1e-1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_head_is_the_models_own_tied_or_not(make_target_dir: TargetMaker, kind: str) -> None:
    target = load(make_target_dir, kind)
    assert torch.equal(target.head, target.model.get_output_embeddings().weight)
    assert (target.head is target.embedding) == bool(target.model.config.tie_word_embeddings)
    assert torch.equal(target.head, target.embedding) == bool(target.model.config.tie_word_embeddings)


def test_layers_come_in_the_order_asked_for(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    forward, backward = target.features(IDS, [1, 4]), target.features(IDS, [4, 1])
    assert torch.equal(forward.hidden, backward.hidden.flip(1))
    assert not torch.equal(forward.hidden, backward.hidden)


def test_features_leave_no_gradient_and_no_training_mode(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    features = target.features(IDS, [1])
    assert not features.hidden.requires_grad
    assert not features.hidden.is_inference()  # a drafter must be able to save it for backward
    assert not any(m.training for m in target.model.modules())
    assert not any(p.requires_grad for p in target.model.parameters())


def test_threads_sharing_a_target_get_their_own_features(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir)
    documents = [IDS[n:] for n in range(6)]
    expected = [target.features(d, [0, 5]) for d in documents]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(10):
            got = target.features(documents[n], [0, 5])
            if not (torch.equal(got.hidden, expected[n].hidden) and torch.equal(got.last, expected[n].last)):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not torch.equal(expected[0].hidden[1:], expected[1].hidden)


@pytest.mark.parametrize(("n_target", "n", "ids"), [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61])])
def test_chosen_layers_are_those_of_the_released_drafters(n_target: int, n: int, ids: list[int]) -> None:
    assert choose_layer_ids(n_target, n) == ids


def test_chosen_layers_are_inside_the_target_and_one_is_the_middle() -> None:
    assert choose_layer_ids(36, 1) == [18]
    for n_target in range(4, 80):
        for n in range(1, 7):
            assert check_layer_ids(choose_layer_ids(n_target, n), n_target)


def test_a_shallow_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="at least 4 layers, got 3"):
        choose_layer_ids(3, 2)
    with pytest.raises(TargetError, match="at least 4 layers, got 3"):
        Target.load(build_target(tmp_path, n_layers=3), torch.float32, "cpu")


@pytest.mark.parametrize("ids", [[6], [-1], [0, 99], []])
def test_a_layer_id_out_of_range_is_refused(make_target_dir: TargetMaker, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"0\.\.5"):
        load(make_target_dir).features(IDS, ids)


def test_an_empty_document_is_refused(make_target_dir: TargetMaker) -> None:
    with pytest.raises(DataError, match="at least one token"):
        load(make_target_dir).features(IDS[:0], [1])


# ---- the mask token


def test_mask_token_is_the_requested_one_then_the_tokenizers_then_an_unused_row(tiny_target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir, local_files_only=True)
    config = load_target_config(tiny_target_dir)
    assert resolve_mask_token(tokenizer, config, 200) == 200
    assert resolve_mask_token(tokenizer, config, None) == tokenizer.mask_token_id == 3
    tokenizer.mask_token = None
    with pytest.raises(TargetError, match=r"mask-token-id"):  # every row is used: never fall back to the pad token
        resolve_mask_token(tokenizer, config, None)
    config.vocab_size += 8
    assert resolve_mask_token(tokenizer, config, None) == len(tokenizer)


@pytest.mark.parametrize(
    ("token", "message"), [(0, "the pad token"), (2, "the eos token"), (384, r"0\.\.383"), (-1, r"0\.\.383")]
)
def test_mask_token_is_never_pad_or_end_or_outside_the_vocabulary(
    tiny_target_dir: Path, token: int, message: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir, local_files_only=True)
    with pytest.raises(ConfigError, match=message):
        resolve_mask_token(tokenizer, load_target_config(tiny_target_dir), token)


def test_a_tokenizer_whose_mask_is_its_pad_token_is_refused(tiny_target_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir, local_files_only=True)
    tokenizer.mask_token = tokenizer.pad_token
    with pytest.raises(ConfigError, match="pad token"):
        resolve_mask_token(tokenizer, load_target_config(tiny_target_dir), None)


# ---- directories that cannot be used


def copy_of(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to))


def refused(directory: Path, match: str) -> None:
    with pytest.raises(TargetError, match=match) as error:
        Target.load(directory, torch.float32, "cpu")
    assert "\n" not in str(error.value)
    assert str(directory) in str(error.value)


def test_a_directory_that_is_not_a_model_is_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such directory")
    refused(tmp_path, r"no config\.json")


def test_a_config_that_is_not_json_is_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    directory = copy_of(tiny_target_dir, tmp_path / "t")
    (directory / "config.json").write_text("{")
    refused(directory, r"JSON in config\.json")


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_one_line(tiny_target_dir: Path, tmp_path: Path, missing: str) -> None:
    directory = copy_of(tiny_target_dir, tmp_path / "t")
    (directory / missing).unlink()
    refused(directory, "directory is complete")


def test_truncated_weights_are_one_line(tiny_target_dir: Path, tmp_path: Path) -> None:
    directory = copy_of(tiny_target_dir, tmp_path / "t")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(directory, "directory is complete")


def test_pickled_weights_are_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    directory = copy_of(tiny_target_dir, tmp_path / "t")
    (directory / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, directory / "pytorch_model.bin")
    refused(directory, "safetensors")


def test_code_in_the_directory_is_never_run_unless_asked_for(tiny_target_dir: Path, tmp_path: Path) -> None:
    directory, mark = copy_of(tiny_target_dir, tmp_path / "t"), tmp_path / "ran"
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise OSError('ran')\n")
    refused(directory, r"--target\.trust-remote-code")
    assert not mark.exists()
    with pytest.raises(TargetError, match="ran"):
        Target.load(directory, torch.float32, "cpu", trust_remote_code=True)
    assert mark.exists()


def test_a_head_that_scales_its_logits_is_refused(make_target_dir: TargetMaker) -> None:
    target = load(make_target_dir, "llama")

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().forward(input)

    head = Scaled(target.hidden_size, target.vocab_size, bias=False)
    head.weight = target.model.lm_head.weight
    target.model.lm_head = head
    with pytest.raises(TargetError, match="scaling"):
        Target(target.model, target.tokenizer, target.path, "")


def test_a_head_with_a_soft_cap_is_refused(make_target_dir: TargetMaker) -> None:
    refused(make_target_dir("gemma2"), "softcapping")


def test_weights_that_are_missing_from_the_file_are_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    """transformers fills them at random and only warns: features and acceptance would mean nothing."""
    directory = copy_of(tiny_target_dir, tmp_path / "t")
    weights = load_file(directory / "model.safetensors")
    weights.pop("model.layers.2.mlp.up_proj.weight")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    refused(directory, "up_proj")


# ---- fingerprint, network


def test_fingerprint_tells_configs_and_weights_apart_and_survives_a_copy(
    make_target_dir: TargetMaker, tmp_path: Path
) -> None:
    first, other = make_target_dir(), make_target_dir(seed=1)
    assert fingerprint(copy_of(first, tmp_path / "copy")) == fingerprint(first)
    assert fingerprint(other) != fingerprint(first)  # same shapes, other weights
    fields = json.loads((tmp_path / "copy" / "config.json").read_text())
    fields["transformers_version"] = "0"
    (tmp_path / "copy" / "config.json").write_text(json.dumps(fields))
    assert fingerprint(tmp_path / "copy") == fingerprint(first)
    fields["rms_norm_eps"] = 1e-3
    (tmp_path / "copy" / "config.json").write_text(json.dumps(fields))
    assert fingerprint(tmp_path / "copy") != fingerprint(first)


def test_loading_never_opens_a_connection(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    tried: list[object] = []

    def refuse(self: object, address: object) -> None:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    Target.load(tiny_target_dir, torch.float32, "cpu")
    refused(Path("Qwen/no-such-directory"), "no such directory")  # a hub name is a missing directory, not a download
    assert tried == []


def test_a_target_in_bfloat16_gives_bfloat16_features(tiny_target_dir: Path) -> None:
    target = Target.load(tiny_target_dir, torch.bfloat16, "cpu")
    features = target.features(IDS, [1])
    assert features.hidden.dtype == features.last.dtype == target.dtype == torch.bfloat16


def test_a_llama_without_tying_and_with_its_own_theta_loads(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 123456.0},
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_target_dir).save_pretrained(tmp_path)
    target = Target.load(tmp_path, torch.float32, "cpu")
    assert target.config.rope_parameters["rope_theta"] == 123456.0
    assert not torch.equal(target.head, target.embedding)
