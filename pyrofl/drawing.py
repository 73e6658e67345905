"""What the figures share: colours, words for axes, tables turned into lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Row = Mapping[str, Any]  # a line of metrics.csv or compare.csv, by column

# Okabe and Ito's, which colour-blind readers tell apart; shapes differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
LINES = ("-", "--", ":", "-.")

METRICS = {
    "accuracy": "accuracy (share of rows)",
    "nll": "negative log likelihood (nats per row)",
    "brier": "Brier score",
    "ece": "expected calibration error",
    "mce": "maximum calibration error",
    "entropy": "entropy of the prediction (nats)",
    "rmse": "root mean squared error (units of y)",
}
POPULATIONS = {
    "training": "clients that train",
    "held_out": "new clients",
    "pooled": "all test rows",
}
ADAPTED = {"none": "", "adapt": ", adapted", "phases": ", trained once more"}


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, that pyplot knows nothing of."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give every name its colour, marker and kind of line."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            # Another round through the colours has other lines.
            "linestyle": LINES[(i % len(COLOURS) + i // len(COLOURS)) % len(LINES)],
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def about(metric: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows on one metric.

    Raises:
        ValueError: if there are none.
    """
    rows = list(rows)
    found = [row for row in rows if row["metric"] == metric]
    if not found:
        known = ", ".join(sorted({row["metric"] for row in rows})) or "no rows"
        raise ValueError(f"no row is about metric {metric!r}; found {known}")
    return found


def series(name: str, row: Row) -> str:
    """Name a line: what it is about, and whether the model was adapted before testing."""
    return name + ADAPTED.get(row["adapted"], f", {row['adapted']}")


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return a mean over seeds and its standard error; 0 for a single seed.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1) / n**0.5) if n > 1 else 0.0


def band(axes: Axes, points: Mapping[int, Sequence[float]], name: str, style: Row) -> None:
    """Draw means over seeds against rounds, and one standard error around them."""
    rounds = sorted(points)
    mean, error = np.array([mean_and_error(points[r]) for r in rounds]).T
    every = max(1, len(rounds) // 10)
    axes.plot(rounds, mean, label=name, markersize=4, markevery=every, **style)
    if error.any():
        axes.fill_between(
            rounds, mean - error, mean + error, color=style["color"], alpha=0.2, linewidth=0
        )


def label_places(
    axis: Axis, names: Sequence[str], places: int, title: str, room: float = np.inf
) -> None:
    """Label places 0, 1... of an axis by name, or by number if they are many.

    Names longer than their `room`, in inches, are turned upright.
    """
    from matplotlib.ticker import MaxNLocator

    axis.set_label_text(title)
    if len(names) != places or places > 20:
        axis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        return
    axis.set_ticks(range(places), list(names))
    if 0.1 * max(map(len, names)) > room:
        axis.set_tick_params(labelrotation=90)


def legend_above(figure: Figure, panels: Iterable[Axes]) -> None:
    """Put one legend for all panels above them, in as many columns as fit."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    columns = int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, found))))
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside upper center",
        ncols=min(len(found), max(1, columns)),
        frameon=False,
    )
