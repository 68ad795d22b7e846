"""The pipeline on GPUs: both roles on streams of one device, or on two devices; the curve is that of one thread."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash import parts
from dflash.config import TrainConfig
from dflash.metrics_file import read
from dflash.pipeline.placement import Placement
from dflash.train import train
from tests.training import quiet_log, small_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def losses(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in read(config.output / "metrics.jsonl", "step")]


def gpu_config(tmp_path: Path, target: Path, **changes: object) -> TrainConfig:
    return small_config(tmp_path, target, **{"device": "cuda", "attn_strategy": "sdpa", "steps": 12, **changes})


def in_turn(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[float]:
    """The curve of one thread on one GPU."""
    first = torch.device("cuda", 0)
    config = gpu_config(tmp_path, target, output=tmp_path / "alone", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "place", lambda *a: Placement((first,), (first,), False))
        train(config, quiet_log())
    return losses(config)


@pytest.mark.parametrize("targets", ["", "cuda:0", "cuda:0,cuda:0"])
def test_both_roles_on_streams_of_one_gpu_give_the_curve_of_one_thread(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, targets: str
) -> None:
    expected = in_turn(tmp_path, tiny_target_dir, monkeypatch)
    config = gpu_config(tmp_path, tiny_target_dir, targets=targets, drafters="cuda:0" if targets else "")
    train(config, quiet_log())
    torch.testing.assert_close(losses(config), expected, rtol=1e-4, atol=1e-5)
    flows = read(config.output / "metrics.jsonl", "flow")
    assert len(flows) == 12


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("targets", "drafters"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:0-1")])
def test_features_that_cross_devices_give_the_curve_of_one_device(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, targets: str, drafters: str
) -> None:
    base = gpu_config(tmp_path, tiny_target_dir)
    changes = {"optim": replace(base.optim, accumulate=2)}
    expected = in_turn(tmp_path, tiny_target_dir, monkeypatch, **changes)
    config = gpu_config(tmp_path, tiny_target_dir, targets=targets, drafters=drafters, **changes)
    train(config, quiet_log())
    torch.testing.assert_close(losses(config), expected, rtol=1e-4, atol=1e-5)
