"""What is seen of a run at a glance, within 80 columns: the same picture for `dflash train` and `dflash watch`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
# weight of the newest step in the time a step takes: the estimate must not jump with every slow step
NEWEST = 0.05
BAR = 28


@dataclass
class Standing:
    """Where a run stands; filled from the records of metrics.jsonl, by `take`, and by whoever shows it."""

    total_steps: int | None = None
    # steps that were done before anything was shown
    done: int = 0
    # what it does now: train, evaluate 3/16, save
    stage: str = "start"
    step: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    # the queue between target and drafter threads, where there is one
    flow: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    # compiles during the run: each one held every thread up
    compiles: int = 0
    last_compile: str = ""
    seconds_a_step: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """One record of metrics.jsonl; kinds that are not shown are passed over."""
        kind = record["kind"]
        if kind == "step":
            self.step, self.stage = record, "train"
            seconds = record["step_ms"] / 1e3
            before = self.seconds_a_step or seconds
            self.seconds_a_step = (1 - NEWEST) * before + NEWEST * seconds
        elif kind == "eval":
            self.evaluation = record
            if not self.best or record["tau"] >= self.best["tau"]:
                self.best = record
        elif kind == "flow":
            self.flow = record
        elif kind == "skip":
            self.skipped += 1
        elif kind == "late_compile":
            self.compiles += 1
            self.last_compile = f"step {record['step']}, {record['thread']}: {record['reason']}"

    @property
    def left_s(self) -> float | None:
        """Seconds of steps still to do; evaluations are not counted. None while unknown."""
        if self.total_steps is None or not self.step:
            return None
        return float((self.total_steps - self.step["step"]) * self.seconds_a_step)


def view(standing: Standing, width: int = 80) -> RenderableType:
    """The lines, each no wider than `width`."""
    lines = [_progress(standing), *_figures(standing), *_acceptance(standing, width), *_flow(standing)]
    if standing.compiles:
        lines.append(Text(f"{standing.compiles} late compiles, last at {standing.last_compile}", style="yellow"))
    if standing.skipped:
        lines.append(Text(f"{standing.skipped} steps skipped", style="yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def step_text(record: Mapping[str, Any], left_s: float | None) -> str:
    """One step on one line, as it is printed where there is no terminal."""
    eta = "" if left_s is None else f"  eta {duration(left_s)}"
    return (
        f"loss {record['loss']:.3f}  acc {record['accuracy']:.3f}  tau {record['tau']:.2f}  "
        f"lr {record['learning_rate']:.2e}  {throughput(record['tok_s'])}{eta}"
    )


def slot_bars(shares: Sequence[float], width: int) -> str:
    """A bar a slot from slot 1 on, with its percentage where there is room: ▇82 ▅61 ▂24."""
    bars = [_block(share) for share in shares]
    long = " ".join(f"{bar}{100 * share:.0f}" for bar, share in zip(bars, shares))
    return long if len(long) <= width else "".join(bars)[:width]


def throughput(tok_s: float) -> str:
    """Tokens a second, in thousands from one thousand on."""
    return f"{tok_s / 1e3:.2f} ktok/s" if tok_s >= 1e3 else f"{tok_s:.0f} tok/s"


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _progress(standing: Standing) -> Text:
    done, total = int(standing.step.get("step", standing.done)), standing.total_steps
    text = Text(f"{standing.stage:<14} ", style="bold")
    if total:
        filled = min(BAR, round(BAR * done / total))
        text.append("━" * filled, style="cyan").append("━" * (BAR - filled), style="bright_black")
        text.append(f" {done}/{total} {100 * done / total:.0f}%")
    else:
        text.append(f"step {done}")
    if standing.left_s is not None:
        text.append(f"  eta {duration(standing.left_s)}")
    return text


def _figures(standing: Standing) -> list[Text]:
    step = standing.step
    if not step:
        return []
    first = (
        f"loss {step['loss']:.3f}  acc {step['accuracy']:.3f}  tau {step['tau']:.2f}  lr {step['learning_rate']:.1e}  "
        f"grad {step['grad_norm']:.2f}  {throughput(step['tok_s'])}"
    )
    return [Text(first)]


def _acceptance(standing: Standing, width: int) -> list[Text]:
    lines = []
    shares = standing.step.get("conditional_acceptance", ())
    if shares:
        lines.append(Text("slots ").append(slot_bars(shares, width - 6), style="green"))
    if standing.evaluation:
        now, best = standing.evaluation, standing.best
        words = f"held-out tau {now['tau']:.3f} at step {now['step']}, best {best['tau']:.3f} at step {best['step']}"
        lines.append(Text(words))
    return lines


def _flow(standing: Standing) -> list[Text]:
    """The queue between targets and drafters; the side that the other waits for is marked."""
    flow = standing.flow
    if not flow:
        return []
    slow = flow["bottleneck"]
    text = Text(f"queue {flow['queued']}/{flow['depth']}")
    for side, field_name in (("targets", "put_wait_ms"), ("drafters", "take_wait_ms")):
        words = f"  {side} wait {flow[field_name]:.0f} ms"
        text.append(words + (" (bottleneck)" if side == slow else ""), style="bold red" if side == slow else "")
    return [text]


def _block(share: float) -> str:
    if not math.isfinite(share):
        return " "
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]
