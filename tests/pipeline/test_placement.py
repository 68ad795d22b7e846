"""Lists of devices: ranges, repetitions, mistakes, shares of a step."""

import pytest
import torch

from dflash.errors import ConfigError
from dflash.pipeline.placement import Placement, devices, layout, place, spelled

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def eight() -> int:
    return 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda:0-4", [f"cuda:{i}" for i in range(5)]),
        ("cuda:5-5", ["cuda:5"]),
        ("cuda", ["cuda:0"]),
        ("cpu,cpu", ["cpu", "cpu"]),
        ("cuda:7, cuda:1-2", ["cuda:7", "cuda:1", "cuda:2"]),
    ],
)
def test_device_lists_are_read_in_their_order(text: str, expected: list[str]) -> None:
    assert [str(device) for device in devices(text, "targets", eight)] == expected


@pytest.mark.parametrize("text", ["cuda:4-1", "gpu", "cpu:1", "cuda:0,,cuda:1", "cuda:a", "cuda:0-"])
def test_an_unreadable_list_is_one_line_that_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--drafters: expected devices such as cuda:0-4") as error:
        devices(text, "drafters", eight)
    assert "\n" not in str(error.value)
    assert repr(text) in str(error.value)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="one of this machine's 2 CUDA devices, got cuda:2"):
        devices("cuda:0-4", "targets", lambda: 2)


def test_without_options_a_gpu_overlaps_both_roles_and_a_cpu_takes_turns() -> None:
    gpu, cpu = place("", "", GPU, eight), place("", "", CPU, eight)
    assert gpu == Placement((GPU,), (GPU,), threaded=True)
    assert gpu.shared
    assert cpu == Placement((CPU,), (CPU,), threaded=False)
    assert "in turn" in str(cpu)


@pytest.mark.parametrize(("targets", "drafters"), [("cpu", ""), ("", "cpu")])
def test_one_of_the_two_options_alone_is_refused(targets: str, drafters: str) -> None:
    with pytest.raises(ConfigError, match="expected both --targets and --drafters"):
        place(targets, drafters, CPU, eight)


def test_kinds_of_devices_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="one kind of device, got cpu and cuda"):
        place("cuda:0", "cpu", CPU, eight)


def test_a_placement_is_printed_as_it_was_written() -> None:
    assert str(place("cuda:0-4", "cuda:5,cuda:7", CPU, eight)) == "targets cuda:0-4, drafters cuda:5,cuda:7"
    assert spelled((CPU, CPU)) == "cpu,cpu"
    assert not place("cuda:0-4", "cuda:5-7", CPU, eight).shared


@pytest.mark.parametrize(
    ("micro_batches", "drafters", "ranks"), [(4, 1, 1), (3, 3, 1), (8, 3, 1), (6, 2, 3), (7, 1, 2), (0, 2, 2)]
)
def test_the_shares_of_all_drafters_of_all_ranks_are_the_whole_step(
    micro_batches: int, drafters: int, ranks: int
) -> None:
    layouts = [layout(micro_batches, drafters, rank, ranks) for rank in range(ranks)]
    taken = [one.own[place] for one in layouts for drafter in range(drafters) for place in one.share(drafter)]
    assert sorted(taken) == list(range(micro_batches or drafters * ranks))
    sizes = [len(one.share(drafter)) for one in layouts for drafter in range(drafters)]
    assert max(sizes) - min(sizes) <= 1


def test_a_drafter_without_work_is_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"--optim\.accumulate: expected .* got 3 for 4; set it to 4 or a multiple"):
        layout(3, 2, 0, 2)


def test_later_steps_have_the_same_owners() -> None:
    one = layout(5, 2, 0, 1)
    assert [one.drafter(number) for number in range(10)] == [0, 1, 0, 1, 0] * 2
