"""Every check of the doctor passes on what is right and warns or fails on what is wrong, with a remedy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash.attention.select import STRATEGIES
from dflash.data.documents import Document
from dflash.doctor import attention, data, machine, resources, target
from dflash.doctor.base import Check, Subject, guarded, passed
from dflash.doctor.estimate import Duration, Memory
from dflash.errors import DataError
from probes.versions import Reach, StateReach, VersionReport

DENSE = torch.arange(24.0).view(4, 2, 3)


def report(found: Reach) -> VersionReport:
    return VersionReport("9.9", (StateReach(machine.FX_FLAG, found, Reach.PROCESS),))


def head(said: bool, tied: bool) -> Any:
    embedding = torch.ones(2, 2)
    own = embedding if tied else torch.ones(2, 2)
    return SimpleNamespace(config=SimpleNamespace(tie_word_embeddings=said), head=own, embedding=embedding)


def rope(theta: float, **more: Any) -> Any:
    return SimpleNamespace(rope_parameters={"rope_theta": theta, "rope_type": "default", **more})


def states(shifted: bool) -> list[torch.Tensor]:
    """embedding, outputs of layers 0 and 1, as transformers lists them; or without the embedding in front."""
    listed = [torch.zeros(4, 3), DENSE[:, 0], DENSE[:, 1]]
    return [*listed[1:], torch.zeros(4, 3)] if shifted else listed


def lost(name: str, **counts: int) -> Check:
    return next(check for check in data.lost_checks({"kept": 90, **counts}) if check.name == name)


def document(*ids: int) -> Document:
    return Document(0, np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool))


def needs(gigabytes: float) -> Memory:
    return Memory(int(gigabytes * 1e9), 0, 0, 0, 0, 0, 0, 0, 0)


def backend(name: str, kernel: str) -> Any:
    made = SimpleNamespace(strategy=STRATEGIES[name](), kernel=kernel)
    return next(c for c in attention.checks(SimpleNamespace(attention=made)) if c.name == "races")  # type: ignore[arg-type]


# what is checked; a case that passes; a case that does not, and how it ends
CASES: list[tuple[str, Callable[[], Check], Callable[[], Check], str]] = [
    ("python", lambda: machine.python_check((3, 12)), lambda: machine.python_check((3, 10)), "fail"),
    (
        "shared state",
        lambda: machine.sharing_check(report(Reach.PROCESS)),
        lambda: machine.sharing_check(report(Reach.THREAD)),
        "warn",
    ),
    (
        "device",
        lambda: next(machine.device_checks(torch.device("cpu"), 2, 2)),
        lambda: next(machine.device_checks(torch.device("cpu"), 8, 2)),
        "warn",
    ),
    ("races", lambda: backend("locked-compile", "flex"), lambda: backend("force-compile", "flex"), "warn"),
    ("races of eager flex", lambda: backend("eager", "sdpa"), lambda: backend("eager", "flex"), "warn"),
    ("tied head", lambda: target.head_check(head(True, True)), lambda: target.head_check(head(True, False)), "fail"),
    ("vocabulary", lambda: target.vocabulary_check(64, 60), lambda: target.vocabulary_check(64, 64), "fail"),
    (
        "rope theta",
        lambda: target.rope_check(rope(1e6), rope(1e6)),
        lambda: target.rope_check(rope(1e6), rope(1e4)),
        "fail",
    ),
    (
        "partial rotary",
        lambda: target.rope_check(rope(1e6), rope(1e6, partial_rotary_factor=1.0)),
        lambda: target.rope_check(rope(1e6, partial_rotary_factor=0.25), rope(1e6)),
        "fail",
    ),
    ("positions", lambda: target.positions_check(512, 512), lambda: target.positions_check(513, 512), "fail"),
    (
        "layer ids",
        lambda: target.layer_check([0], DENSE, states(False)),
        lambda: target.layer_check([0], DENSE, states(True)),
        "fail",
    ),
    (
        "final norm elsewhere",
        lambda: target.norm_check(DENSE[:, 0], DENSE[:, 1], DENSE[:, 0]),
        lambda: target.norm_check(DENSE[:, 0], DENSE[:, 1], DENSE[:, 1]),
        "fail",
    ),
    (
        "final norm missing",
        lambda: target.norm_check(DENSE[:, 0], DENSE[:, 1], DENSE[:, 0]),
        lambda: target.norm_check(DENSE[:, 0], DENSE[:, 0], DENSE[:, 0]),
        "warn",
    ),
    ("supervised", lambda: data.supervised_check(50, 100, 3), lambda: data.supervised_check(2, 100, 3), "warn"),
    ("truncated", lambda: lost("truncated", truncated=1), lambda: lost("truncated", truncated=9), "warn"),
    ("too long", lambda: lost("left out: too long"), lambda: lost("left out: too long", dropped=10), "warn"),
    ("no answer", lambda: lost("left out: no answer"), lambda: lost("left out: no answer", no_assistant=10), "warn"),
    ("empty masks", lambda: lost("empty masks"), lambda: lost("empty masks", unsupervised=10), "warn"),
    ("duplicates", lambda: lost("duplicates"), lambda: lost("duplicates", duplicates=10), "warn"),
    ("other prompt", lambda: lost("other prompt"), lambda: lost("other prompt", other_prompt=10), "warn"),
    ("no anchor", lambda: data.anchors_check(60, 64, 0, 8, 8), lambda: data.anchors_check(0, 64, 8, 8, 8), "fail"),
    ("padding", lambda: data.anchors_check(60, 64, 0, 8, 8), lambda: data.anchors_check(6, 64, 0, 8, 8), "warn"),
    ("empty", lambda: data.anchors_check(60, 64, 0, 8, 8), lambda: data.anchors_check(30, 64, 4, 8, 8), "warn"),
    (
        "held out",
        lambda: data.heldout_check([[1, 2]], [document(1, 3, 2)]),
        lambda: data.heldout_check([[1, 2]], [document(1, 2, 3)]),
        "warn",
    ),
    ("agreement", lambda: data.agreement_check(0.97), lambda: data.agreement_check(0.5), "warn"),
    (
        "memory",
        lambda: resources.memory_check(needs(1), int(2e9)),
        lambda: resources.memory_check(needs(3), int(2e9)),
        "fail",
    ),
    (
        "tight memory",
        lambda: resources.memory_check(needs(1), None),
        lambda: resources.memory_check(needs(1.9), int(2e9)),
        "warn",
    ),
    ("disk", lambda: resources.disk_check(1, 100), lambda: resources.disk_check(101, 100), "fail"),
    ("tight disk", lambda: resources.disk_check(1, 100), lambda: resources.disk_check(90, 100), "warn"),
    (
        "evaluations",
        lambda: resources.time_check(Duration(9000, 900), 10),
        lambda: resources.time_check(Duration(900, 9000), 10),
        "warn",
    ),
    (
        "weeks",
        lambda: resources.time_check(Duration(1e6, 0), 10),
        lambda: resources.time_check(Duration(1e7, 0), 10),
        "warn",
    ),
]


@pytest.mark.parametrize(("good", "bad", "status"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_check_passes_what_is_right_and_finds_what_is_wrong(
    good: Callable[[], Check], bad: Callable[[], Check], status: str
) -> None:
    right, wrong = good(), bad()
    assert (right.status, right.remedy) == ("pass", "")
    assert wrong.status == status
    assert wrong.remedy
    assert wrong.found


def test_an_error_of_a_group_is_a_failed_check_with_the_same_remedy() -> None:
    def group(subject: Subject) -> Any:
        yield passed("first", "fine")
        raise DataError("documents", "none", "give some", where="x.jsonl")

    first, second = guarded("data", group, SimpleNamespace())  # type: ignore[arg-type]
    assert first.status == "pass"
    assert second == Check("data", "fail", "x.jsonl: expected documents, got none", "give some")


def test_a_program_error_of_a_group_is_not_hidden() -> None:
    def group(subject: Subject) -> Any:
        raise KeyError("ours")
        yield

    with pytest.raises(KeyError):
        list(guarded("data", group, SimpleNamespace()))  # type: ignore[arg-type]


def test_a_warning_without_a_remedy_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        Check("x", "warn", "odd")
