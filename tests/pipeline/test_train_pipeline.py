"""Training through threads: the curve of one thread, bit for bit; stops, resumes, stores, what is shown."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash import checkpoint
from dflash.config import TrainConfig
from dflash.errors import ConfigError, Stopped
from dflash.metrics_file import read
from dflash.train import Training, train
from tests.training import curve, printed, quiet_log, small_config


def threaded(config: TrainConfig, name: str, targets: int, drafters: int = 1, **changes: object) -> TrainConfig:
    spelled = {"targets": ",".join(["cpu"] * targets), "drafters": ",".join(["cpu"] * drafters)}
    return replace(config, output=config.output.parent / name, **spelled, **changes)  # type: ignore[arg-type]


def same_weights(a: TrainConfig, b: TrainConfig) -> bool:
    x, y = (checkpoint.load(checkpoint.newest(c.output / "checkpoints")) for c in (a, b))
    return all(torch.equal(x.weights[name], y.weights[name]) for name in x.weights)


def test_the_curve_of_one_two_or_three_target_threads_is_that_of_no_thread_to_the_bit(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    alone = small_config(tmp_path, tiny_target_dir)
    train(alone, quiet_log())
    for targets in (1, 2, 3):
        config = threaded(alone, f"targets-{targets}", targets, queue_depth=targets)
        assert train(config, quiet_log()) == 0
        assert curve(config.output) == curve(alone.output)
        assert same_weights(config, alone)


def test_drafter_threads_share_a_step_and_give_its_curve(tmp_path: Path, tiny_target_dir: Path) -> None:
    alone = small_config(tmp_path, tiny_target_dir, steps=5)
    alone = replace(alone, optim=replace(alone.optim, accumulate=3))
    train(alone, quiet_log())
    three = threaded(alone, "three", 2, 3)
    train(three, quiet_log())
    assert curve(three.output) == curve(alone.output), "a micro-batch each: the same sums in the same order"
    two = threaded(alone, "two", 2, 2)
    train(two, quiet_log())
    losses = [[record["loss"] for record in read(c.output / "metrics.jsonl", "step")] for c in (alone, two)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    assert not same_weights(two, alone), "shares of two: other rounding, or the test compares nothing"


def test_without_accumulate_every_drafter_gets_a_micro_batch_and_the_run_remembers(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = threaded(small_config(tmp_path, tiny_target_dir, steps=4), "run", 1, 2)
    log = quiet_log()
    train(config, log)
    assert "targets cpu, drafters cpu,cpu" in printed(log)
    explicit = small_config(tmp_path, tiny_target_dir, steps=4, output=tmp_path / "explicit")
    train(replace(explicit, optim=replace(explicit.optim, accumulate=2)), quiet_log())
    assert curve(config.output) == curve(explicit.output)


def test_fewer_micro_batches_than_drafters_are_refused_before_anything_is_written(
    tmp_path: Path, tiny_target_dir: Path
) -> None:
    config = threaded(small_config(tmp_path, tiny_target_dir), "run", 1, 3)
    config = replace(config, optim=replace(config.optim, accumulate=2))
    with pytest.raises(ConfigError, match="got 2 for 3; set it to 3 or a multiple"):
        train(config, quiet_log())
    assert not config.output.exists()


@pytest.mark.parametrize("then", [(1, 1), (3, 2)])
def test_a_stopped_pipeline_drains_saves_and_resumes_exactly_with_other_threads(
    tmp_path: Path, tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, then: tuple[int, int]
) -> None:
    whole = small_config(tmp_path, tiny_target_dir)
    whole = replace(whole, optim=replace(whole.optim, accumulate=2))
    train(whole, quiet_log())
    parted = threaded(whole, "parted", 2, 2)
    original = Training.account

    def stopping(self: Training, result: object) -> None:
        original(self, result)  # type: ignore[arg-type]
        if self.progress.step == 4:
            self.signals.signal_number = 15

    monkeypatch.setattr(Training, "account", stopping)
    with pytest.raises(Stopped):
        train(parted, quiet_log())
    monkeypatch.undo()
    assert checkpoint.saved_steps(parted.output / "checkpoints")[-1] == 4
    resumed = replace(threaded(parted, "parted", *then), resume=True)
    train(resumed, quiet_log())
    # two drafters with one micro-batch each and one drafter with both take the same sums in the same order
    assert curve(parted.output) == curve(whole.output)
    assert same_weights(parted, whole)


def test_how_the_queue_stands_is_written_with_every_step(tmp_path: Path, tiny_target_dir: Path) -> None:
    config = threaded(small_config(tmp_path, tiny_target_dir), "run", 2, queue_depth=3)
    train(config, quiet_log())
    flows = read(config.output / "metrics.jsonl", "flow")
    assert [record["step"] for record in flows] == list(range(1, 9))
    for record in flows:
        assert 0 <= record["queued"] <= record["depth"] == 3
        assert record["bottleneck"] in ("targets", "drafters", "neither")
        assert record["put_wait_ms"] >= 0 <= record["take_wait_ms"]


@pytest.mark.parametrize("features", ["cache", "offline"])
def test_threads_read_and_fill_a_feature_store(tmp_path: Path, tiny_target_dir: Path, features: str) -> None:
    online = threaded(small_config(tmp_path, tiny_target_dir, steps=4), "online", 2)
    caching = replace(online.data, features="cache", feature_store=tmp_path / "features")
    cached = replace(online, output=tmp_path / "cached", data=caching)
    train(online, quiet_log())
    train(cached, quiet_log())
    again = replace(cached, output=tmp_path / "again", data=replace(caching, features=features))  # type: ignore[arg-type]
    train(again, quiet_log())
    assert curve(online.output) == curve(cached.output) == curve(again.output)


def test_a_batch_without_an_anchor_passes_through_the_threads(tmp_path: Path, tiny_target_dir: Path) -> None:
    import json

    from tests.training import write_chats

    write_chats(tmp_path / "chats.jsonl", 4)
    with (tmp_path / "chats.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"prompt": f"Say {i}", "completion": "7"}) + "\n" for i in range(4))
    config = threaded(small_config(tmp_path, tiny_target_dir), "run", 2, 2)
    config = replace(config, data=replace(config.data, pack=False))
    train(config, quiet_log())
    state = checkpoint.read_state(checkpoint.newest(config.output / "checkpoints"))["state"]["progress"]
    assert state["empty_batches"] == 8
    assert state["step"] == 8
