"""The picture of `dflash bench strategies`: throughput and cold start, side by side; what did not live says so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError

LIVE, DEAD = "#3b6ea5", "#b0413e"


def require_matplotlib() -> None:
    """ConfigError, before anything is measured, when the extra is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("matplotlib", "none installed", "pip install 'dflash[plot]'", where="--plot") from error


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture; the format is that of the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.6 * len(results) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, cold = figure.subplots(1, 2, sharey=True)
    names = [f"{r['job']['strategy']} x{r['job']['threads']}" for r in results]
    for axes, field, title in ((speed, "steady_ktok_s", "steady, Ktok/s"), (cold, "cold_total_s", "cold start, s")):
        values = [r[field] or 0.0 for r in results]
        bars = axes.barh(names, values, color=[LIVE if r["outcome"] == "ok" else DEAD for r in results])
        axes.bar_label(bars, labels=[_label(r, field) for r in results], padding=3)
        axes.set_title(title)
        axes.margins(x=0.3)
    speed.invert_yaxis()
    figure.savefig(path)


def _label(result: dict[str, Any], field: str) -> str:
    value = result[field]
    number = "" if value is None else f"{value:.1f}"
    return number if result["outcome"] == "ok" else f"{number} {result['outcome']}".strip()
