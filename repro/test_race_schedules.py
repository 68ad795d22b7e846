"""Every feasible schedule of two threads: some fail where torch has the fault, none elsewhere or under a strategy."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.child import run_child
from repro.exhaustive import SUBJECTS, Subject
from repro.expected import expectation, fault, release
from repro.measure import Measurement

pytestmark = [pytest.mark.race, pytest.mark.timeout(900)]
# the fault of the table that the subject's schedules contain
FAULT_OF = {"ANNOTATE": "ANNOTATE-A"}


@pytest.mark.parametrize("entry", SUBJECTS, ids=lambda entry: entry.body)
def test_race_schedules_of_two_threads_fail_exactly_where_the_fault_exists(
    entry: Subject, strategy: str | None, record: Callable[[Measurement], None]
) -> None:
    chosen = ["--strategy", strategy] if strategy is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "count.json"
        outcome = run_child(["-m", "repro.counts", entry.name, "--json", str(path), *chosen], 800.0)
        assert outcome.code == 0, outcome.output
        counted = json.loads(path.read_text())[0]
    expected = "absent" if strategy is not None else expectation(fault(FAULT_OF.get(entry.name, entry.name)), release())
    right = counted["failing"] == 0 if expected == "absent" else 0 < counted["failing"] < counted["schedules"]
    wrong = None if right else f"expected {expected}, got: {outcome.line}"
    record(
        Measurement(
            fault=f"SCHEDULES-{entry.name}",
            torch=counted["torch"],
            strategy=strategy,
            expected=expected,
            verdicts=("shown",) * counted["failing"] + ("clean",) * (counted["schedules"] - counted["failing"]),
            lines=(re.sub(r"\s+", " ", outcome.line),),
            seconds=outcome.seconds,
            wrong=wrong,
        )
    )
    assert wrong is None, wrong


def test_race_points_of_a_compiled_call_come_in_order() -> None:
    """A warm call passes the check and the callback, ends with its removal, and compiles nothing, hooks included."""
    program = (
        "import torch\n"
        "from repro.points import hooked\n"
        "seen = []\n"
        "with hooked(seen.append, {'call.check', 'call.callback', 'call.restored', 'compile.locked'}):\n"
        "    compiled = torch.compile(lambda x: x * 2, backend='eager')\n"
        "    compiled(torch.ones(2))\n"
        "    cold = list(seen)\n"
        "    seen.clear()\n"
        "    compiled(torch.ones(2))\n"
        "print(cold.count('compile.locked'), *seen)\n"
    )
    outcome = run_child(["-c", program], 200.0)
    compiles, *warm = outcome.line.split()
    assert compiles == "1", outcome.output
    assert warm[:2] == ["call.check", "call.callback"]  # dynamo takes it off and on again round the compiled code
    assert warm[-1] == "call.restored"
    assert "compile.locked" not in warm


def test_race_a_schedule_replays_move_by_move() -> None:
    """On every torch: the same order gives the same trace and the same verdict, in another process."""
    command = ["-m", "repro.replay", "FXSTUCK-A", "AAABBAABBB"]
    first, second = run_child(command, 200.0), run_child(command, 200.0)
    assert "left module_call_original False" in first.line
    assert first.output == second.output
    assert run_child(["-m", "repro.replay", "FXSTUCK-A", "AAAAABBBBB"], 200.0).line.endswith("nothing wrong")
