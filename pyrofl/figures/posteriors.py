"""Figures of posteriors that statisticians teach with: shrinkage, forests, what federation costs.

As in `pyrofl.figures`, every function returns a matplotlib Figure of its own. A `Summary` is what
`pyrofl.reference.cost` has in its columns mean, low and high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.figures.style import COLOURS, MARKERS, canvas, legend_above, mark_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#999999"

Summary = tuple[Any, Any, Any]
"""Means [J], and the lower and upper ends [J] of 95% intervals."""


def cost(table: Any, names: tuple[str, str] = ("federated", "NUTS")) -> Figure:
    """Draw what federation costs: both posteriors, the shift of means and the ratio of spreads.

    Args:
        table: what `pyrofl.reference.cost` returns, or some of its rows. Several variables are
            drawn in standard deviations, one in its own unit.
        names: of the two fits.
    """
    figure = canvas(8.4, _height(len(table)))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    columns = ("mean", "low", "high")
    mine = tuple(table[c].to_numpy() for c in columns)
    other = tuple(table[f"reference_{c}"].to_numpy() for c in columns)
    left.set_xlabel("mean and 95% interval")
    if table["variable"].nunique() > 1:  # of different units, perhaps
        centre, unit = (table[c].to_numpy() for c in ("reference_mean", "reference_sd"))
        mine, other = (tuple((v - centre) / unit for v in fit) for fit in (mine, other))
        left.set_xlabel(f"mean and 95% interval\n(around the mean of {names[1]}, in its sds)")
    _intervals(left, list(map(str, table.index)), {names[0]: mine, names[1]: other})
    places = np.arange(len(table))
    for axes, column, target, near in (
        (middle, "difference", 0.0, 0.2),
        (right, "ratio", 1.0, 0.15),
    ):
        axes.axvspan(target - near, target + near, color=GREY, alpha=0.2, linewidth=0)
        axes.axvline(target, color=GREY, linewidth=0.8)
        axes.plot(table[column], places, "o", color=COLOURS[0], markersize=3.5)
        reach = 1.1 * max(2 * near, float(np.abs(table[column] - target).max()))
        axes.set_xlim(max(target - reach, 0.0) if column == "ratio" else -reach, target + reach)
    middle.set_xlabel(f"shift of the mean\n(in sds of {names[1]})")
    right.set_xlabel(f"ratio of sds\n({names[0]} / {names[1]})")
    legend_above(figure, [left], note="grey: shifts below 0.2 sds, ratios within 15%")
    return figure


def forest(
    fits: Mapping[str, Summary], labels: Sequence[str], title: str, truth: Any = None
) -> Figure:
    """Draw the intervals of several fits below each other.

    Args:
        fits: name -> summary of its J rows; NaN leaves a gap.
        labels: of the J rows, from top to bottom.
        title: of the axis, with its unit.
        truth: values [J] that all fits are about.
    """
    figure = canvas(6.4, _height(len(labels) * max(1.0, 0.55 * len(fits))))
    axes = figure.subplots()
    _intervals(axes, labels, fits)
    if truth is not None:
        axes.plot(truth, np.arange(len(labels)), "k*", markersize=7, label="later known", zorder=5)
    axes.set_xlabel(title)
    legend_above(figure, [axes])
    return figure


def shrinkage(
    names: Sequence[str],
    raw: Any,
    posterior: Summary,
    centre: float,
    title: str,
    truth: Any = None,
) -> Figure:
    """Draw how each client's own estimate is pulled towards the population.

    Args:
        names: of the J clients; they are sorted by their own estimate.
        raw: [J], the clients' own estimates.
        posterior: of the clients.
        centre: mean of the population.
        title: of the axis, with its unit.
        truth: [J], what turned out later.
    """
    raw, mean, low, high = (np.asarray(v, dtype=float) for v in (raw, *posterior))
    order = np.argsort(-raw, kind="stable")
    figure = canvas(6.4, _height(len(raw)))
    axes = figure.subplots()
    places = np.arange(len(raw))
    axes.axvline(centre, color=GREY, linestyle="--", label="population mean")
    axes.hlines(places, raw[order], mean[order], color=GREY, linewidth=0.8)
    axes.plot(raw[order], places, "o", mfc="white", color=COLOURS[1], label="own estimate")
    _intervals(
        axes, [names[i] for i in order], {"posterior": (mean[order], low[order], high[order])}
    )
    if truth is not None:
        axes.plot(np.asarray(truth)[order], places, "k*", label="later known", zorder=5)
    axes.set_xlabel(title)
    legend_above(figure, [axes])
    return figure


def pooling(
    size: Any,
    raw: tuple[Any, Any],
    partial: tuple[Any, Any],
    centre: float,
    title: str,
    unit: str = "rows of the client",
) -> Figure:
    """Draw clients' estimates against their rows, each on its own and partially pooled.

    Small clients scatter on their own, and lean on the population in a hierarchical model (Gelman
    and Hill, "Data Analysis Using Regression and Multilevel/Hierarchical Models", 2007, fig. 12.1).

    Args:
        size: [J], rows of every client.
        raw: own estimates [J] and their standard errors [J]; NaN where a client has none.
        partial: posterior means [J] and standard deviations [J].
        centre: mean of the population.
        title: of the estimates, with their unit.
        unit: what is counted by size.
    """
    figure = canvas(8.4, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    size = np.asarray(size, dtype=float)
    # Clients of one size would hide each other.
    beside = size * np.exp(0.04 * np.sin(2.4 * np.arange(len(size))))
    for axes, name, (mean, sd), colour in (
        (panels[0], "each on its own", raw, COLOURS[1]),
        (panels[1], "hierarchical", partial, COLOURS[0]),
    ):
        axes.axhline(centre, color=GREY, linestyle="--", label="population mean")
        axes.errorbar(beside, mean, sd, fmt="o", ms=3, lw=0.8, color=colour, label=name, alpha=0.8)
        mark_sizes(axes.xaxis, size)
        axes.set_xlabel(unit)
    panels[0].set_ylabel(title)
    legend_above(figure, panels, note="bars: one standard error or deviation")
    return figure


def courses(
    at: Sequence[float], posterior: Summary, labels: Sequence[str], across: str, up: str
) -> Figure:
    """Draw how parameters change from client to client, as over years: a panel for each.

    Args:
        at: places of the J clients.
        posterior: means and ends of intervals, each [J, P].
        labels: of the P parameters.
        across: label of the places.
        up: label of the parameters, with their unit.
    """
    columns = min(len(labels), 4)
    figure = canvas(2.1 * columns, 1.8 * -(-len(labels) // columns) + 0.6)
    grid = figure.subplots(-(-len(labels) // columns), columns, sharex=True, squeeze=False).ravel()
    for k, (axes, label) in enumerate(zip(grid, labels, strict=False)):
        mean, low, high = (np.asarray(v)[:, k] for v in posterior)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.errorbar(at, mean, (mean - low, high - mean), fmt="o", ms=3.5, color=COLOURS[0])
        axes.set_title(label, fontsize=10)
        axes.tick_params(labelsize=8, labelbottom=k + columns >= len(labels))
    for axes in grid[len(labels) :]:
        axes.remove()
    figure.supxlabel(across, fontsize=10)
    figure.supylabel(up, fontsize=10)
    return figure


def lines(panels: Mapping[str, tuple[Any, Any, Any, Any]], across: str, up: str) -> Figure:
    """Draw every client's rows, its line of least squares and its posterior of lines.

    Args:
        panels: client -> x [N] and y [N] of its rows, places [P], and draws [S, P] of its line.
        across: label of x, with its unit.
        up: label of y, with its unit.
    """
    columns = min(len(panels), 6 if len(panels) <= 24 else 8)
    rows = -(-len(panels) // columns)
    figure = canvas(1.35 * columns + 0.6, 1.25 * rows + 0.8)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, (x, y, at, draws)) in zip(grid, panels.items(), strict=False):
        x, y, at, draws = (np.asarray(v, dtype=float) for v in (x, y, at, draws))
        low, high = np.quantile(draws, [0.025, 0.975], 0)
        axes.fill_between(at, low, high, color=COLOURS[0], alpha=0.25, lw=0, label="95% interval")
        axes.plot(at, draws.mean(0), color=COLOURS[0], label="posterior mean")
        if len(np.unique(x)) > 1:
            own = np.polynomial.Polynomial.fit(x, y, 1)(at)
            axes.plot(at, own, "--", color=COLOURS[1], lw=1, label="least squares, alone")
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set_title(name, fontsize=8, pad=2)
        axes.tick_params(labelsize=7)
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.supxlabel(across, fontsize=10)
    figure.supylabel(up, fontsize=10)
    legend_above(figure, grid[: len(panels)])
    return figure


def _intervals(axes: Axes, labels: Sequence[str], fits: Mapping[str, Summary]) -> None:
    """Draw a mean and an interval for each label and fit, from top to bottom."""
    places = np.arange(len(labels))
    shift = 0.6 / len(fits)
    for i, (name, summary) in enumerate(fits.items()):
        mean, low, high = (np.asarray(v, dtype=float) for v in summary)
        at = places + shift * (i - (len(fits) - 1) / 2)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "lw": 1.2, "ms": 3.5}
        style |= {"fmt": MARKERS[i % len(MARKERS)], "label": name}
        axes.errorbar(mean, at, xerr=(mean - low, high - mean), **style)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(places, labels, fontsize=9 if len(labels) <= 40 else 6)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)


def _height(rows: float) -> float:
    """Return the height of a figure, in inches, for so many rows."""
    return 1.3 + max(0.11 if rows > 40 else 0.23, 1.5 / rows) * rows
