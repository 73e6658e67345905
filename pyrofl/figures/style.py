"""What the figures share: colours, words for axes, tables turned into lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    from numpy.typing import NDArray

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
    "ece_classwise": "expected calibration error over all classes",
    "mce_classwise": "maximum calibration error over all classes",
    "entropy": "entropy of the prediction (nats)",
    "rmse": "root mean squared error (units of y)",
}
POPULATIONS = {
    "training": "clients that train",
    "held_out": "new clients",
    "pooled": "all test rows",
}
SHARES = {"smallest_": "smallest 10% of clients", "pooled_": POPULATIONS["pooled"]}
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


def axis_label(metric: str) -> str:
    """Return a metric of a table in words, with its unit.

    >>> axis_label("smallest_nll")
    'negative log likelihood (nats per row), smallest 10% of clients'
    """
    for prefix, whose in SHARES.items():
        if metric.startswith(prefix):
            return f"{axis_label(metric.removeprefix(prefix))}, {whose}"
    return METRICS.get(metric, metric)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return a mean over seeds and its standard error; 0 for a single seed.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1) / n**0.5) if n > 1 else 0.0


def band(axes: Axes, points: Mapping[int, Sequence[float]], name: str, style: Row) -> None:
    """Draw means over seeds against rounds, and one standard error around them.

    A single round, too narrow for a band, gets a bar.
    """
    rounds = sorted(points)
    mean, error = np.array([mean_and_error(points[r]) for r in rounds]).T
    every = max(1, len(rounds) // 10)
    axes.plot(rounds, mean, label=name, markersize=4, markevery=every, **style)
    if len(rounds) == 1 and error.any():
        axes.errorbar(rounds, mean, error, fmt="none", color=style["color"], capsize=3)
    elif error.any():
        axes.fill_between(
            rounds, mean - error, mean + error, color=style["color"], alpha=0.2, linewidth=0
        )


def log_band(axes: Axes, values: NDArray[Any], name: str, style: Row) -> int:
    """Draw the geometric mean of runs, [runs, rounds], and its 95% band; return how many runs."""
    from scipy.stats import t

    logs = np.log(values)
    runs, rounds = len(values), len(values[0])
    mean = logs.mean(0)
    axes.plot(np.exp(mean), label=name, markersize=4, markevery=max(1, rounds // 10), **style)
    if runs > 2:  # of two runs the t band spans the page
        half = t.ppf(0.975, runs - 1) * logs.std(0, ddof=1) / runs**0.5
        low, high = np.exp(mean - half), np.exp(mean + half)
        axes.fill_between(range(rounds), low, high, color=style["color"], alpha=0.2, linewidth=0)
    return runs


def density(values: NDArray[Any], top: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Estimate a density on [0, top] by normal kernels, mirrored at both ends: places, heights.

    The bandwidth is Silverman's, and no less than 1% of the range.
    """
    counts, edges = np.histogram(np.clip(values, 0, top), 400, (0, top))
    at = (edges[1:] + edges[:-1]) / 2
    low, high = np.quantile(values, [0.25, 0.75])
    spread = min(np.std(values), (high - low) / 1.34) or np.std(values)
    width = max(0.9 * spread * len(values) ** -0.2, top / 100)
    sources = np.stack([at, -at, 2 * top - at])
    kernel = np.exp(-0.5 * ((at[:, None, None] - sources) / width) ** 2).sum(1)
    height = kernel @ counts / (len(values) * width * (2 * np.pi) ** 0.5)
    return at, height


def bubbles(axes: Axes, x: Any, y: Any, rows: Any, joined: Any, name: str, style: Row) -> None:
    """Draw points, [N], whose area grows with their rows; a line joins all but the hollow ones."""
    colour, marker = style["color"], style["marker"]
    axes.plot(x, np.where(joined, y, np.nan), linestyle=style["linestyle"], color=colour)
    axes.scatter(
        x,
        y,
        s=12 + 90 * rows / max(1, rows.max()),
        marker=marker,
        facecolors=[colour if full else "white" for full in joined],
        edgecolors=colour,
        alpha=0.85,
        clip_on=False,
        zorder=3,
    )
    axes.plot([], [], label=name, **style)


def whole_numbers(most: int) -> MaxNLocator:
    """Place at most so many steps between ticks, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def mark_rounds(axis: Axis) -> None:
    """Label an axis of rounds at whole numbers only, however few they are."""
    axis.set_label_text("round")
    axis.set_major_locator(whole_numbers(8))


def mark_sizes(axis: Axis, size: Any) -> None:
    """Label an axis of clients' training rows, [J]; its scale is the logarithm if they vary much.

    Clients without rows, which a logarithm cannot show, keep the scale linear.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_label_text("training rows of the client")
    if not size.max() > 20 * size.min() > 0:
        return
    axis.axes.set_xscale("log")
    decades = np.log10(size.max() / size.min())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def label_places(
    axis: Axis, names: Sequence[str], places: int, title: str, room: float = np.inf
) -> None:
    """Label places 0, 1... of an axis by name, or by number if they are many.

    A name that starts with the title loses it: "client 3" is 3 on an axis of clients. Names longer
    than their `room`, in inches, are turned upright.
    """
    axis.set_label_text(title)
    if len(names) != places or places > 20:
        axis.set_major_locator(whole_numbers(10))
        return
    short = [name.removeprefix(f"{title} ") for name in names]
    axis.set_ticks(range(places), short)
    if 0.1 * max(map(len, short)) > room:
        axis.set_tick_params(labelrotation=90)


def legend_above(
    figure: Figure, panels: Iterable[Axes], order: Iterable[str] = (), note: str = ""
) -> None:
    """Put one legend for all panels above them, in as many columns as fit.

    Args:
        figure: gets the legend.
        panels: hold what it explains, by label.
        order: of labels; those it lacks follow as they are found.
        note: a line in small print above the labels.
    """
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    found = {name: found[name] for name in dict.fromkeys([*order, *found])}
    columns = int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, found))))
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside upper center",
        ncols=min(len(found), max(1, columns)),
        frameon=False,
        title=note or None,
        title_fontproperties={"size": 9},
    )
