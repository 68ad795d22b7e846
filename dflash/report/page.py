"""The page: a summary of each run, pictures over the steps, what differs, and where it ran."""

import statistics
import time
from collections.abc import Iterator, Sequence

from dflash.report.charts import Bars, Series, bar_chart, legend, line_chart
from dflash.report.markup import Markup, joined, table, tag
from dflash.report.run_data import Record, RunData, ago, differences
from dflash.report.style import STYLE
from dflash.report.timeline import timeline

SUMMARY = (
    *("run", "state", "steps", "held-out tau", "speed-up", "same as greedy", "last loss"),
    *("ktok/s (median)", "time in steps"),
)
MOST_ROWS = 50
NOTE_TRAINING = "teacher-forced blocks of the training data, not decoding"


def page(runs: Sequence[RunData]) -> str:
    """One self-contained HTML document."""
    title = "dflash: " + ", ".join(run.name for run in runs)
    sections = [
        tag("h1", None, "Training report" if len(runs) == 1 else f"Training report: {len(runs)} runs"),
        legend([(run.name, number) for number, run in enumerate(runs)]),
        table(SUMMARY, [_summary(run) for run in runs]),
        tag("h2", None, "Acceptance"),
        tag("div", {"class": "charts"}, *_acceptance(runs)),
        tag("h2", None, "Training"),
        tag("div", {"class": "charts"}, *_training(runs)),
        *_time_lines(runs),
        *_events(runs),
        tag("h2", None, "Configuration"),
        *_configuration(runs),
        tag("h2", None, "Environment"),
        _named_values("environment", runs, [run.environment for run in runs]),
        tag("footer", None, f"written {time.strftime('%Y-%m-%d %H:%M')} by dflash report"),
    ]
    head = tag(
        "head",
        None,
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("meta", {"name": "color-scheme", "content": "light dark"}),
        # without it a browser asks for favicon.ico
        Markup('<link rel="icon" href="data:,">'),
        tag("title", None, title),
        tag("style", None, Markup(STYLE)),
    )
    body = tag("body", None, tag("main", None, *sections))
    return f"<!doctype html>\n{tag('html', {'lang': 'en'}, head, body)}\n"


def _summary(run: RunData) -> list[str]:
    made = run.steps[-1]["step"] if run.steps else 0
    steps = f"{made} of {run.total_steps}" if run.total_steps else str(made)
    shown = run.final or run.best
    return [
        run.name,
        run.state,
        steps,
        f"{shown['tau']:.3f} (step {shown['step']})" if shown else "-",
        f"{run.final['speedup']:.2f}x" if run.final and run.final.get("speedup") else "-",
        _identical(run.final),
        f"{run.steps[-1]['loss']:.3f}" if run.steps else "-",
        f"{statistics.median(r['tok_s'] for r in run.steps) / 1e3:.2f}" if run.steps else "-",
        ago(sum(r["step_ms"] for r in run.steps) / 1e3) if run.steps else "-",
    ]


def _identical(final: Record | None) -> str:
    if final is None or final.get("identical") is None:
        return "-"
    return f"{final['identical']} of {final['prompts']}"


def _acceptance(runs: Sequence[RunData]) -> Iterator[Markup]:
    held_out = [Series(run.name, run.points("tau", run.evaluations), i, dots=True) for i, run in enumerate(runs)]
    note = "mean tokens a block gives, the target's own one included"
    yield line_chart("Acceptance length on held-out prompts", held_out, unit="tau", note=note)
    slots = [Bars(run.name, _slots(run), i) for i, run in enumerate(runs)]
    labels = [str(slot) for slot in range(1, 1 + max((len(bars.values) for bars in slots), default=0))]
    note = "share of right tokens among blocks whose earlier slots were all right; best or final evaluation"
    yield bar_chart("Acceptance by slot", slots, labels, unit="share", note=note)
    yield _curves(runs, "tau", "Acceptance length in training", "tau", NOTE_TRAINING)


def _slots(run: RunData) -> list[float]:
    """Of the closing evaluation, else of the best one, else of the last training step."""
    source = run.final or run.best or (run.steps[-1] if run.steps else {})
    found: list[float] = list(source.get("conditional_acceptance", ()))
    return found


def _training(runs: Sequence[RunData]) -> Iterator[Markup]:
    yield _curves(runs, "loss", "Loss", "sum(w·l) / sum(w)")
    yield _curves(runs, "accuracy", "Accuracy over all slots", "share", f"{NOTE_TRAINING}; not acceptance")
    yield _curves(runs, "tok_s", "Throughput", "ktok/s", "context tokens, padding not counted", 1e-3)
    yield _curves(runs, "step_ms", "Time of a step", "ms")
    yield _curves(runs, "grad_norm", "Gradient norm before clipping", "")
    yield _curves(runs, "learning_rate", "Learning rate", "")
    yield from _flow(runs)


def _curves(
    runs: Sequence[RunData], field: str, title: str, unit: str, note: str = "", scale: float = 1.0
) -> Markup:
    curves = [Series(run.name, run.points(field, scale=scale), i) for i, run in enumerate(runs)]
    return line_chart(title, curves, unit=unit, note=note)


def _flow(runs: Sequence[RunData]) -> Iterator[Markup]:
    """The queue between targets and drafters, of runs that have one."""
    waits: list[Series] = []
    for run in runs:
        for side, field in (("targets wait for room", "put_wait_ms"), ("drafters wait for features", "take_wait_ms")):
            if points := run.points(field, run.flows):
                waits.append(Series(side if len(runs) == 1 else f"{run.name}: {side}", points, len(waits)))
    if waits:
        note = "the side that waits is not the bottleneck"
        yield line_chart("Queue waits", waits, unit="ms a step", note=note, keys=True)
        queued = [Series(run.name, run.points("queued", run.flows), i) for i, run in enumerate(runs)]
        yield line_chart("Queue", queued, unit="micro-batches", note="that have features and wait for a drafter")


def _time_lines(runs: Sequence[RunData]) -> Iterator[Markup]:
    pictures = [timeline(f"{run.name}: {name}", found) for run in runs for name, found in run.traces]
    if pictures:
        yield tag("h2", None, "Compile time line by thread")
        yield from pictures


def _events(runs: Sequence[RunData]) -> Iterator[Markup]:
    late = [[run.name, str(r["step"]), str(r["thread"]), str(r["reason"])] for run in runs for r in run.late_compiles]
    if late:
        yield tag("h2", None, f"Compiles during the run ({len(late)})")
        yield table(("run", "step", "thread", "reason"), late[:MOST_ROWS])
    rows = [[run.name, str(r["step"]), str(r["reason"]), str(r.get("loss", ""))] for run in runs for r in run.skips]
    if rows:
        yield tag("h2", None, f"Skipped steps ({len(rows)})")
        yield table(("run", "step", "reason", "loss"), rows[:MOST_ROWS])


def _configuration(runs: Sequence[RunData]) -> Iterator[Markup]:
    configs = [run.config for run in runs]
    if len(runs) > 1:
        different = [name for name in differences(configs) if name not in ("resume", "overwrite")]
        rows = [[name, *(config.get(name, "-") for config in configs)] for name in different]
        yield table(("differs", *(run.name for run in runs)), rows) if rows else tag("p", None, "no difference")
    whole = _named_values("option", runs, configs)
    yield tag("details", None, tag("summary", None, "every option"), whole)


def _named_values(heading: str, runs: Sequence[RunData], columns: Sequence[dict[str, str]]) -> Markup:
    names = dict.fromkeys(name for column in columns for name in column)
    if not names:
        return tag("p", {"class": "empty"}, "not recorded in this run")
    heads = [run.name for run in runs] if len(runs) > 1 else ["value"]
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return joined([table((heading, *heads), rows)])
