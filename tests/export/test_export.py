"""Exports say to other loaders what the drafter is, come back bit-equal, and are refused in one line when damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash.drafter.config import create_drafter_config
from dflash.drafter.model import DFlashDrafter
from dflash.errors import CheckpointError, OutputError
from dflash.export.formats import WRITERS, compare, read_export
from dflash.export.qwen3_fields import from_fields, to_fields
from dflash.export.speculators import read_speculators, write_speculators
from dflash.export.zlab import read_zlab, write_zlab
from dflash.target import Target
from tests.conftest import TargetMaker
from tests.test_decode import load

LAYERS = [1, 3, 4]
MASK = 3
FORMATS = sorted(WRITERS)


@pytest.fixture(scope="module")
def target(make_target_dir: TargetMaker) -> Target:
    return load(make_target_dir, "qwen3-untied")


def make_drafter(target: Target, window: int | None = None, causal: bool = True) -> DFlashDrafter:
    config = create_drafter_config(target.config, 2, window, causal)
    drafter = DFlashDrafter(config, LAYERS, block_size=5, max_anchors=8, mask_token_id=MASK)
    generator = torch.Generator().manual_seed(4)
    for name, weight in drafter.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data = 1.0 + 0.2 * noise if "norm" in name else 0.15 * noise
    drafter.bind_target(target.embedding, target.head)
    return drafter


def exported(drafter: DFlashDrafter, target: Target, directory: Path, kind: str = "zlab") -> Path:
    WRITERS[kind](drafter, target, directory)
    return directory


def change_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("window", "causal"), [(None, True), (6, True), (6, False)])
def test_an_export_read_back_gives_the_same_logits(
    target: Target, tmp_path: Path, kind: str, window: int | None, causal: bool
) -> None:
    drafter = make_drafter(target, window, causal)
    again = read_export(exported(drafter, target, tmp_path / "out", kind))
    assert again.bound == (kind == "speculators")
    again.bind_target(target.embedding, target.head)
    assert compare(drafter, again) == 0.0
    assert again.config.layer_types == drafter.config.layer_types
    assert again.config.sliding_causal_block == causal
    assert (again.block_size, again.mask_token_id, list(again.target_layer_ids)) == (5, MASK, LAYERS)
    with torch.no_grad():
        again.norm.weight[0] += 0.5
    assert compare(drafter, again) > 1e-3


def test_both_formats_say_the_same(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    zlab = read_export(exported(drafter, target, tmp_path / "z", "zlab"))
    zlab.bind_target(target.embedding, target.head)
    assert compare(zlab, read_export(exported(drafter, target, tmp_path / "s", "speculators"))) == 0.0


def served_logits(directory: Path, target: Target, hidden: Tensor, block: Tensor) -> Tensor:
    """A z-lab export as a server runs it: written from the format's description, with transformers' own rotary."""
    config, w = AutoConfig.from_pretrained(directory), load_file(directory / "model.safetensors")
    D, heads, kv = config.head_dim, config.num_attention_heads, config.num_key_value_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def heads_of(x: Tensor, name: str, n: int) -> Tensor:
        return F.linear(x, w[f"{name}.weight"]).view(1, -1, n, D)

    S = hidden.shape[1]
    ctx = norm(F.linear(hidden.flatten(2), w["fc.weight"]), "hidden_norm")
    x = target.embedding[block]
    cos, sin = Qwen3RotaryEmbedding(config)(x, torch.arange(S + block.shape[1])[None])
    for i in range(config.num_hidden_layers):
        at = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm")
        both = torch.cat([ctx, h], 1)
        q = norm(heads_of(h, f"{at}.q_proj", heads), f"{at}.q_norm").transpose(1, 2)
        k = norm(heads_of(both, f"{at}.k_proj", kv), f"{at}.k_norm").transpose(1, 2)
        v = heads_of(both, f"{at}.v_proj", kv).transpose(1, 2)
        q = apply_rotary_pos_emb(q, q, cos[:, S:], sin[:, S:])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        x = x + F.linear(out, w[f"{at}.o_proj.weight"])
        m = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up, down = (w[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + F.linear(F.silu(F.linear(m, gate)) * F.linear(m, up), down)
    return F.linear(norm(x, "norm"), target.head)[:, 1:]


def test_a_server_that_reads_only_the_files_computes_the_same_logits(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target)
    directory = exported(drafter, target, tmp_path / "out")
    hidden = target.features(torch.arange(5, 27), LAYERS).hidden[None]
    block = torch.tensor([[9, MASK, MASK, MASK, MASK]])
    ours = drafter.draft(drafter.new_cache(), hidden, block, 22)
    torch.testing.assert_close(served_logits(directory, target, hidden, block), ours, rtol=1e-4, atol=1e-4)

    def default_theta(fields: dict[str, Any]) -> None:
        fields["rope_parameters"]["rope_theta"] = fields["rope_theta"] = 10000.0

    change_config(directory, default_theta)
    assert not torch.allclose(served_logits(directory, target, hidden, block), ours, atol=1e-2)


def test_zlab_config_has_every_field_its_loaders_read(target: Target, tmp_path: Path) -> None:
    fields = json.loads((exported(make_drafter(target), target, tmp_path / "out") / "config.json").read_text())
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["model_type"] == "qwen3"
    assert fields["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert fields["block_size"] == 5
    assert fields["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": LAYERS}
    assert (fields["num_target_layers"], fields["num_hidden_layers"]) == (6, 2)
    assert fields["layer_types"] == ["full_attention"] * 2
    assert fields["tie_word_embeddings"] is False
    assert fields["dtype"] == "float32"
    assert "is_causal" not in fields
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]  # no code


def test_zlab_tensors_are_the_formats_and_hold_no_embedding_and_no_head(target: Target, tmp_path: Path) -> None:
    names = set(load_file(exported(make_drafter(target), target, tmp_path / "out") / "model.safetensors"))
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    layer |= {f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_sliding_layers_say_how_they_see_the_block(target: Target, tmp_path: Path) -> None:
    for name, causal in (("causal", True), ("both", False)):
        directory = exported(make_drafter(target, 6, causal), target, tmp_path / name)
        fields = json.loads((directory / "config.json").read_text())
        assert fields["layer_types"] == ["sliding_attention"] * 2
        assert (fields["sliding_window"], fields["use_sliding_window"]) == (6, True)
        assert fields.get("is_causal") is (None if causal else False)
        write_speculators(make_drafter(target, 6, causal), target, tmp_path / f"s-{name}")
        fields = json.loads((tmp_path / f"s-{name}" / "config.json").read_text())
        assert fields["sliding_window_non_causal"] is not causal


def test_speculators_config_counts_layers_from_the_embedding_and_tokens_without_the_anchor(
    target: Target, tmp_path: Path
) -> None:
    directory = exported(make_drafter(target), target, tmp_path / "out", "speculators")
    fields = json.loads((directory / "config.json").read_text())
    assert fields["speculators_model_type"] == "dflash"
    assert fields["aux_hidden_state_layer_ids"] == [i + 1 for i in LAYERS]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
    assert fields["speculators_config"]["proposal_methods"] == [proposal]
    assert fields["speculators_config"]["default_proposal_method"] == "greedy"
    assert fields["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert fields["transformer_layer_config"]["model_type"] == "qwen3"
    assert (fields["draft_vocab_size"], fields["sample_from_anchor"]) == (target.vocab_size, False)
    assert list(read_speculators(directory).target_layer_ids) == LAYERS
    change_config(directory, lambda c: c.update(aux_hidden_state_layer_ids=[0, 3, 4]))
    with pytest.raises(CheckpointError, match="layer ids"):  # 0 is the embedding's output: no layer of ours
        read_speculators(directory)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_the_exported_head_is_the_targets_even_when_tied(
    make_target_dir: TargetMaker, tmp_path: Path, kind: str
) -> None:
    tied = load(make_target_dir, kind)
    write_speculators(make_drafter(tied), tied, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tied.model.get_output_embeddings().weight)
    assert torch.equal(tensors["embed_tokens.weight"], tied.model.get_input_embeddings().weight)
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"]) == (kind == "qwen3")


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = [{"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25}, YARN]


@pytest.mark.parametrize("rope", ROPES)
def test_theta_scaling_and_partial_rotary_reach_readers_of_either_spelling(
    target: Target, tmp_path: Path, rope: dict[str, Any]
) -> None:
    config = create_drafter_config(target.config, 1)
    config.rope_parameters = dict(rope)
    drafter = DFlashDrafter(config, LAYERS, 5, mask_token_id=MASK)
    drafter.bind_target(target.embedding, target.head)
    write_zlab(drafter, target, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["rope_theta"] == rope["rope_theta"]
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters.items() >= rope.items()
    modern = read_zlab(tmp_path / "out")
    change_config(tmp_path / "out", lambda c: c.pop("rope_parameters"))
    old = read_zlab(tmp_path / "out")
    for again in (modern, old):
        again.bind_target(target.embedding, target.head)
        assert again.config.rope_parameters.items() >= rope.items()
        assert compare(drafter, again) == 0.0


def test_a_config_without_any_theta_is_refused_instead_of_taking_a_default(target: Target, tmp_path: Path) -> None:
    fields = to_fields(make_drafter(target).config)
    assert from_fields(fields, "x").rope_parameters["rope_theta"] == 50000.0
    for name in ("rope_theta", "rope_parameters"):
        fields.pop(name)
    with pytest.raises(CheckpointError, match="rope_theta"):
        from_fields(fields, "x")


def test_the_position_table_is_as_long_as_the_targets(target: Target, tmp_path: Path) -> None:
    fields = json.loads((exported(make_drafter(target), target, tmp_path / "out") / "config.json").read_text())
    assert fields["max_position_embeddings"] == target.config.max_position_embeddings
    assert fields["max_position_embeddings"] != Qwen3Config().max_position_embeddings


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("fc.weight"), "no fc.weight"),
    "extra": (lambda t: t.update(surplus=torch.ones(1)), "unknown surplus"),
    "shape": (lambda t: t.update({"norm.weight": torch.ones(7)}), r"norm.weight of \[64\], got \[7\]"),
    "nan": (lambda t: t["norm.weight"].fill_(float("nan")), "finite norm.weight"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_a_tensor_missing_unknown_misshapen_or_not_finite_is_named(
    target: Target, tmp_path: Path, kind: str, damage: str
) -> None:
    directory = exported(make_drafter(target), target, tmp_path / "out", kind)
    change, message = DAMAGE[damage]
    change_tensors(directory, change)
    with pytest.raises(CheckpointError, match=message) as error:
        read_export(directory)
    assert "\n" not in str(error.value)
    assert str(directory) in str(error.value)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("keep", [0, 40, -1])
def test_a_truncated_file_is_one_line(target: Target, tmp_path: Path, kind: str, file: str, keep: int) -> None:
    directory = exported(make_drafter(target), target, tmp_path / "out", kind)
    path = directory / file
    path.write_bytes(path.read_bytes()[: keep if keep >= 0 else -2])
    with pytest.raises(CheckpointError, match=file) as error:
        read_export(directory)
    assert "\n" not in str(error.value)


def test_pickled_weights_are_never_read(target: Target, tmp_path: Path) -> None:
    directory = exported(make_drafter(target), target, tmp_path / "out")
    tensors = load_file(directory / "model.safetensors")
    torch.save(tensors, directory / "pytorch_model.bin")
    read_zlab(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickles"):
        read_zlab(directory)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("zlab", {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ("zlab", {"dflash_config": None}, "dflash_config"),
        ("zlab", {"block_size": "5"}, "block_size"),
        ("zlab", {"is_causal": True}, "both ways"),
        ("zlab", {"attention_bias": True}, "attention_bias"),
        ("zlab", {"head_dim": None}, "head_dim"),
        ("zlab", {"num_target_layers": 3}, "layer ids"),
        ("zlab", {"hidden_size": 32}, "config and weights do not match"),
        ("speculators", {"draft_vocab_size": 100}, "draft_vocab_size"),
        ("speculators", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("speculators", {"projector_type": "domino"}, "projector_type"),
        ("speculators", {"speculators_model_type": "eagle3"}, "eagle3"),
        ("speculators", {"target_hidden_size": 128}, "target_hidden_size"),
        ("speculators", {"mask_token_id": None}, "mask_token_id"),
    ],
)
def test_a_config_of_another_kind_of_drafter_is_refused(
    target: Target, tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    directory = exported(make_drafter(target), target, tmp_path / "out", kind)
    change_config(directory, lambda c: c.update(change))
    with pytest.raises(CheckpointError, match=message):
        read_export(directory)


def test_a_directory_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_export(tmp_path)


def test_a_directory_in_use_is_never_overwritten(target: Target, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    exported(make_drafter(target), target, tmp_path / "out")  # an empty directory is free
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(OutputError, match="in use"):
        exported(make_drafter(target, 6), target, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_a_full_disk_leaves_nothing_behind(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="no space left"):
        exported(make_drafter(target), target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_weights_are_exported_as_they_are(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target).to(torch.bfloat16)
    directory = exported(drafter, target, tmp_path / "out")
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(t.dtype == torch.bfloat16 for t in load_file(directory / "model.safetensors").values())
    again = read_zlab(directory)
    assert again.fc.weight.dtype == torch.float32  # masters are float32, holding the same numbers
    assert torch.equal(again.fc.weight, drafter.fc.weight.float())
