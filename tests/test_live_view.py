"""The live view: within the width, what it shows, and that it marks the bottleneck only where there is one."""

import io

import pytest
from rich.console import Console

from dflash.live_view import Standing, bottleneck, duration, slot_bars, step_text, view
from tests.report.made_runs import step_record


def shown(standing: Standing, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(view(standing, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def full() -> Standing:
    standing = Standing(total_steps=400)
    slots = [0.9 - 0.05 * k for k in range(15)]
    standing.take({**step_record(100), "conditional_acceptance": slots, "waits_ms": {"target": 40.0, "drafter": 3.0}})
    standing.take({"kind": "eval", "step": 50, "tau": 2.0})
    standing.take({"kind": "eval", "step": 100, "tau": 1.5})
    standing.take({"kind": "compile", "step": 1, "what": "forward: first compile " + 30 * "x"})
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
    assert "bottleneck: drafter" in text
    assert "compiled 1 times, last at step 1: forward" in text
    assert "1 steps skipped" in text


def test_a_run_that_has_logged_nothing_is_one_line() -> None:
    assert shown(Standing(total_steps=10)).splitlines() == [f"{'start':<14} {'━' * 28} 0/10 0%"]


def test_slots_that_do_not_fit_with_figures_are_bars_alone() -> None:
    assert slot_bars([1.0, 0.5, 0.0], 80) == "█100 ▅50 ▁0"
    assert slot_bars([1.0, 0.5, 0.0], 8) == "█▅▁"
    assert len(slot_bars([0.5] * 63, 74)) == 63
    assert slot_bars([float("nan")], 80).startswith(" ")


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ({"target": 40.0, "drafter": 3.0}, "drafter"),
        ({"target": 3.0, "drafter": 40.0}, "target"),
        ({"target": 30.0, "drafter": 40.0}, None),
        ({"target": 0.0, "drafter": 0.1}, None),
        ({"target": 40.0}, None),
    ],
)
def test_the_bottleneck_is_the_side_that_the_others_wait_for(waits: dict[str, float], expected: str | None) -> None:
    assert bottleneck(waits) == expected


def test_the_time_left_follows_a_slow_step_slowly() -> None:
    standing = Standing(total_steps=101)
    standing.take({**step_record(1), "step_ms": 1000.0})
    assert standing.left_s == pytest.approx(100.0)
    standing.take({**step_record(1), "step_ms": 21_000.0})
    assert standing.left_s == pytest.approx(200.0)
    assert duration(3725) == "1:02:05"
    assert step_text(step_record(1), 65.0).endswith("eta 1:05")
