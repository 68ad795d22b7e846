"""Faults at every station of a training through threads: ended in time, named, and resumed exactly."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash import checkpoint
from dflash.config import TrainConfig
from dflash.errors import DflashError, Diverged, Hung, OutOfMemory, OutputError
from dflash.features import Features, FeatureSource
from dflash.pipeline.crew import ThreadDied
from dflash.pipeline.feed import Feed
from dflash.pipeline.order import Order
from dflash.step import Stepper
from dflash.target import Target
from dflash.train import train
from tests.training import curve, printed, quiet_log, small_config

# the promise is 5 seconds for all threads; the rest is what a busy machine needs to get there
LIMIT_S = 15.0


class Injected(Exception):
    """An error of the test's own."""


@pytest.fixture
def config(tmp_path: Path, tiny_target_dir: Path) -> TrainConfig:
    """Two targets, two drafters, 8 steps of two micro-batches, a checkpoint every third step."""
    made = small_config(tmp_path, tiny_target_dir, targets="cpu,cpu", drafters="cpu,cpu")
    return replace(made, optim=replace(made.optim, accumulate=2))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> list[tuple[object, ...]]:
    """The curve of the same training, uninterrupted and without threads."""
    made = small_config(tmp_path_factory.mktemp("whole"), tiny_target_dir)
    train(replace(made, optim=replace(made.optim, accumulate=2)), quiet_log())
    return curve(made.output)


@contextmanager
def failing(owner: Any, name: str, at: int, error: Callable[[], BaseException], times: int = 1) -> Iterator[None]:
    """Calls number `at` and the following `times` - 1 of `owner.name`, counted over all threads, raise."""
    original, calls, lock = getattr(owner, name), [0], threading.Lock()

    def call(*arguments: Any, **options: Any) -> Any:
        with lock:
            calls[0] += 1
            mine = calls[0]
        if at <= mine < at + times:
            raise error()
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield
    assert calls[0] >= at, "the fault never came"


def no_thread_left() -> bool:
    return not [t.name for t in threading.enumerate() if t.name.startswith(("target-", "drafter-", "watchdog"))]


def resumed_equals(config: TrainConfig, whole: list[tuple[object, ...]]) -> bool:
    """The newest checkpoint is whole, and going on from it gives the uninterrupted curve."""
    saved = checkpoint.saved_steps(config.output / "checkpoints")
    if saved:
        checkpoint.load(checkpoint.newest(config.output / "checkpoints"))
        train(replace(config, resume=True), quiet_log())
    else:
        train(replace(config, overwrite=True), quiet_log())
    return curve(config.output) == whole


STATIONS = {
    "target": (FeatureSource, "rows"),
    "drafter": (Stepper, "forward_backward"),
    "taking from the feed": (Feed, "take"),
    "putting into the feed": (Feed, "put"),
    "update": (Stepper, "update"),
    "data": (Order, "after"),
}


@pytest.mark.parametrize(("station", "at"), [("target", 1), *((station, 9) for station in STATIONS)])
def test_an_error_at_any_station_ends_all_threads_and_the_resumed_run_is_the_uninterrupted_one(
    config: TrainConfig, whole: list[tuple[object, ...]], station: str, at: int
) -> None:
    owner, name = STATIONS[station]
    at = min(at, 5) if station in ("update", "data") else at
    began = time.monotonic()
    with failing(owner, name, at, lambda: Injected(station)), pytest.raises(Injected, match=station) as caught:
        train(config, quiet_log())
    assert time.monotonic() - began < LIMIT_S
    assert no_thread_left()
    assert "raise error()" in "".join(traceback.format_exception(caught.value))
    if station in ("target", "drafter"):
        notes = " ".join(caught.value.__notes__)
        assert f"in {station}-" in notes
        assert "batch 0/" in notes or "batch 1/" in notes
        assert "documents" in notes
    assert resumed_equals(config, whole)


@pytest.mark.parametrize("at", [4])
def test_a_disk_that_fills_up_in_a_save_ends_all_threads(
    config: TrainConfig, whole: list[tuple[object, ...]], at: int
) -> None:
    full = OSError(28, "No space left on device")
    with failing(checkpoint, "save_file", at, lambda: full), pytest.raises(OutputError, match="no space left"):
        train(config, quiet_log())
    assert no_thread_left()
    assert resumed_equals(config, whole)


@pytest.mark.parametrize("at", [1, 16])
def test_a_target_thread_that_dies_is_replaced_and_the_curve_is_the_same(
    config: TrainConfig, whole: list[tuple[object, ...]], at: int
) -> None:
    log = quiet_log()
    with failing(FeatureSource, "rows", at, lambda: Injected("a device fell off")):
        train(replace(config, restarts=1), log)
    assert curve(config.output) == whole
    assert "restarted after target-" in printed(log)
    assert "a device fell off" in printed(log)


def test_a_target_thread_that_dies_more_often_than_allowed_ends_the_run(
    config: TrainConfig, whole: list[tuple[object, ...]]
) -> None:
    with failing(FeatureSource, "rows", 9, lambda: Injected("gone"), times=3), pytest.raises(Injected, match="gone"):
        train(replace(config, restarts=2), quiet_log())
    assert resumed_equals(config, whole)


def test_a_thread_that_ends_without_an_error_is_missed(config: TrainConfig, whole: list[tuple[object, ...]]) -> None:
    with (
        failing(FeatureSource, "rows", 9, lambda: SystemExit(0)),
        pytest.raises(ThreadDied, match=r"target-\d was ended"),
    ):
        train(config, quiet_log())
    assert no_thread_left()
    assert resumed_equals(config, whole)


@pytest.mark.parametrize(
    ("station", "error", "knob", "threads"),
    [
        ("target", torch.OutOfMemoryError("CUDA out of memory"), "--data.row-tokens", "cpu,cpu"),
        ("target", MemoryError(), "--queue-depth", ""),
        ("drafter", torch.OutOfMemoryError("CUDA out of memory"), "--checkpoint-layers", ""),
        ("drafter", RuntimeError("DefaultCPUAllocator: can't allocate memory"), "--drafter.max-anchors", "cpu,cpu"),
    ],
)
def test_out_of_memory_names_the_device_the_batch_and_the_options(
    config: TrainConfig, station: str, error: BaseException, knob: str, threads: str
) -> None:
    owner, name = STATIONS[station]
    config = replace(config, targets=threads, drafters=threads)
    with failing(owner, name, 7, lambda: error), pytest.raises(OutOfMemory) as caught:
        train(config, quiet_log())
    text = str(caught.value)
    assert knob in text
    assert text.startswith(f"cpu, {station}, batch 0/")
    assert caught.value.__cause__ is error
    assert no_thread_left()


def test_an_error_that_is_not_about_memory_stays_what_it_is(config: TrainConfig) -> None:
    with failing(FeatureSource, "rows", 2, lambda: RuntimeError("shape")), pytest.raises(RuntimeError, match="shape"):
        train(config, quiet_log())


def poisoned(document: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's second chosen layer gives a NaN at token 3 of one document."""
    original = FeatureSource.document

    def features(self: FeatureSource, document_id: int, input_ids: torch.Tensor) -> Features:
        found = original(self, document_id, input_ids)
        if document_id != document:
            return found
        hidden = found.hidden.clone()
        hidden[3, -1] = float("nan")
        return Features(hidden, found.last)

    monkeypatch.setattr(FeatureSource, "document", features)


def test_steps_that_are_not_finite_are_skipped_counted_and_at_the_limit_traced_to_sample_and_layer(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(5, monkeypatch)
    config = replace(config, steps=60, drafter=replace(config.drafter, layers=1, features=2))
    log = quiet_log()
    limited = replace(config, optim=replace(config.optim, max_nonfinite=1))
    with pytest.raises(Diverged, match=r"target layer output \d+ at token 3 of document 5 \(batch 0/\d+") as caught:
        train(limited, log)
    assert "loss of slot" in str(caught.value)
    assert no_thread_left()


def test_a_nan_now_and_then_does_not_stop_a_run_and_leaves_the_weights_finite(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(5, monkeypatch)
    train(replace(config, steps=20), quiet_log())
    state = checkpoint.load(checkpoint.newest(config.output / "checkpoints"))
    assert state.state["progress"]["nonfinite"] >= 1
    assert all(torch.isfinite(weight).all() for weight in state.weights.values())


@pytest.mark.parametrize("station", ["drafter"])
def test_a_thread_that_hangs_is_found_by_the_watchdog_and_its_stack_written(
    config: TrainConfig, whole: list[tuple[object, ...]], station: str
) -> None:
    owner, name = STATIONS[station]
    release = threading.Event()
    hung: list[bool] = []
    original = getattr(owner, name)

    def hanging(*arguments: Any) -> Any:
        if len(hung) == 8 and not release.is_set():
            release.wait(60)
        hung.append(True)
        return original(*arguments)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, hanging)
            with pytest.raises(Hung, match="nothing moved for") as caught:
                train(replace(config, watchdog=2.0), quiet_log())
    finally:
        release.set()
    assert caught.value.exit_code == 3
    assert any("still running" in note for note in caught.value.__notes__)
    stacks = (config.output / "stacks.txt").read_text()
    assert "hanging" in stacks
    assert "drafter-0" in stacks
    assert isinstance(caught.value, DflashError)
    assert resumed_equals(config, whole)


def test_a_watchdog_leaves_a_healthy_run_alone(config: TrainConfig, whole: list[tuple[object, ...]]) -> None:
    train(replace(config, watchdog=20.0), quiet_log())
    assert curve(config.output) == whole
    assert not (config.output / "stacks.txt").exists()


def test_a_target_is_shared_by_the_threads_of_one_device(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Path] = []
    original = Target.load.__func__  # type: ignore[attr-defined]

    def load(cls: type[Target], path: Path, *rest: Any) -> Target:
        loads.append(path)
        return original(cls, path, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(Target, "load", classmethod(load))
    train(replace(config, steps=1), quiet_log())
    assert len(loads) == 1
