"""The live view: within the width, what it shows, and that it marks the bottleneck only where there is one."""

import io

import pytest
from rich.console import Console

from dflash.live_view import Standing, duration, slot_bars, step_text, view
from tests.report.made_runs import step_record

FLOW = {
    "kind": "flow", "step": 100, "queued": 3, "depth": 4, "put_wait_ms": 40.0, "take_wait_ms": 3.0,
    "elapsed_ms": 120.0, "restarted": [], "bottleneck": "drafters",
}  # fmt: skip


def shown(standing: Standing, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view(standing, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def full() -> Standing:
    standing = Standing(total_steps=400)
    slots = [0.9 - 0.05 * k for k in range(15)]
    standing.take({**step_record(100), "conditional_acceptance": slots})
    standing.take(FLOW)
    standing.take({"kind": "eval", "step": 50, "tau": 2.0})
    standing.take({"kind": "eval", "step": 100, "tau": 1.5})
    standing.take({"kind": "late_compile", "step": 1, "thread": "drafter-0", "reason": 40 * "x"})
    standing.take({"kind": "skip", "step": 3, "reason": "not finite"})
    return standing


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_the_width_and_nothing_is_folded(width: int) -> None:
    lines = shown(full(), width).splitlines()
    assert len(lines) == 7
    assert max(len(line) for line in lines) <= width


def test_all_that_a_run_logs_is_seen() -> None:
    text = shown(full())
    assert "100/400 25%" in text
    assert "slots █90 ▇85" in text
    assert "held-out tau 1.500 at step 100, best 2.000 at step 50" in text
    assert "queue 3/4  targets wait 40 ms  drafters wait 3 ms (bottleneck)" in text
    assert "1 late compiles, last at step 1, drafter-0: xxx" in text
    assert "1 steps skipped" in text


def test_a_run_that_has_logged_nothing_is_one_line() -> None:
    assert shown(Standing(total_steps=10)).splitlines() == [f"{'start':<14} {'━' * 28} 0/10 0%"]


def test_slots_that_do_not_fit_with_figures_are_bars_alone() -> None:
    assert slot_bars([1.0, 0.5, 0.0], 80) == "█100 ▅50 ▁0"
    assert slot_bars([1.0, 0.5, 0.0], 8) == "█▅▁"
    assert len(slot_bars([0.5] * 63, 74)) == 63
    assert slot_bars([float("nan")], 80).startswith(" ")


@pytest.mark.parametrize(("slow", "marked"), [("targets", 1), ("drafters", 1), ("neither", 0)])
def test_only_the_side_that_the_other_waits_for_is_marked(slow: str, marked: int) -> None:
    standing = full()
    standing.take({**FLOW, "bottleneck": slow})
    text = shown(standing)
    assert text.count("(bottleneck)") == marked
    assert f"{slow} wait" in text or not marked


def test_the_time_left_follows_a_slow_step_slowly() -> None:
    standing = Standing(total_steps=101)
    standing.take({**step_record(1), "step_ms": 1000.0})
    assert standing.left_s == pytest.approx(100.0)
    standing.take({**step_record(1), "step_ms": 21_000.0})
    assert standing.left_s == pytest.approx(200.0)
    assert duration(3725) == "1:02:05"
    assert step_text(step_record(1), 65.0).endswith("eta 1:05")
