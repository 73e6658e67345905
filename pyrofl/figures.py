"""Figures of partitions, learning curves, calibration and clients.

Every function returns a matplotlib Figure of its own: no window opens, and pyplot's state is not
touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.drawing import (
    COLOURS,
    METRICS,
    POPULATIONS,
    Row,
    about,
    band,
    canvas,
    label_places,
    legend_above,
    mean_and_error,
    series,
    styles,
)
from pyrofl.metrics import Bins
from pyrofl.records import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def partition(counts: Any, names: Sequence[str] = (), classes: Sequence[str] = ()) -> Figure:
    """Draw who holds how many rows of which class.

    Args:
        counts: [clients, classes] numbers of rows.
        names: of the clients; by default, and if they are many, their numbers.
        classes: names of the classes, likewise.
    """
    from matplotlib.colors import PowerNorm

    counts = np.asarray(counts)
    clients, kinds = counts.shape
    tall = float(np.clip(0.25 * kinds, 1.5, 6))
    wide = float(np.clip(0.32 * clients, 3, 10))
    figure = canvas(wide + 2, tall + 2.4)
    bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=[1, tall])
    bars.bar(range(clients), counts.sum(1), width=0.9, color="#777777")
    bars.set_ylabel("rows")
    bars.spines[["top", "right"]].set_visible(False)
    image = heat.pcolormesh(
        np.arange(clients + 1) - 0.5,
        np.arange(kinds + 1) - 0.5,
        counts.T,
        cmap="Blues",
        # The root shows the few rows of a class beside the many.
        norm=PowerNorm(0.5, vmin=0, vmax=max(1, counts.max())),
        edgecolors="white",
        linewidth=0.5 if max(counts.shape) <= 40 else 0,
    )
    heat.invert_yaxis()
    label_places(heat.xaxis, names, clients, "client", room=wide / clients)
    label_places(heat.yaxis, classes, kinds, "class")
    figure.colorbar(image, ax=heat, label="rows of a class", pad=0.01, aspect=tall / 0.15)
    return figure


def curves(rows: Iterable[Row], metric: str = "accuracy") -> Figure:
    """Draw a metric against the round, with a band of one standard error over seeds.

    Args:
        rows: of metrics.csv, each with its "method" and "seed" as well. Every model and population
            in them gets a panel, every method and adaptation a line.
        metric: the one to draw.

    Raises:
        ValueError: if no row is about the metric.
    """
    panels: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    for row in about(metric, rows):
        lines = panels.setdefault((row["model"], row["population"]), {})
        points = lines.setdefault(series(row["method"], row), defaultdict(list))
        points[int(row["round"])].append(float(row["value"]))
    style = styles(name for lines in panels.values() for name in lines)
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = canvas(max(6, 4.2 * columns), 3.1 * height + 0.5)
    grid = figure.subplots(height, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, ((model, population), lines) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(f"{model} model, {POPULATIONS.get(population, population)}", fontsize=10)
        for name, points in lines.items():
            band(axes, points, name, style[name])
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel(METRICS.get(metric, metric))
    legend_above(figure, grid.flat[: len(panels)])
    return figure


def comparison(rows: Iterable[Row], metric: str = "accuracy") -> Figure:
    """Draw the final metric of every method: each seed, and the mean with its standard error.

    Args:
        rows: of compare.csv. Every method gets a line, every model and adaptation a colour.
        metric: the one to draw.

    Raises:
        ValueError: if no row is about the metric.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in about(metric, rows):
        values = found.setdefault(series(f"{row['model']} model", row), defaultdict(list))
        values[row["method"]].append(float(row["value"]))
    methods = list(dict.fromkeys(method for values in found.values() for method in values))
    figure = canvas(6.4, 1.4 + 0.26 * len(methods) * max(2, len(found)))
    axes = figure.subplots()
    for i, (name, style) in enumerate(styles(found).items()):
        heights = [methods.index(m) + 0.7 * ((i + 0.5) / len(found) - 0.5) for m in found[name]]
        for height, seeds in zip(heights, found[name].values(), strict=True):
            axes.plot(seeds, [height] * len(seeds), ".", color=style["color"], alpha=0.35)
        mean, error = np.array([mean_and_error(seeds) for seeds in found[name].values()]).T
        axes.errorbar(
            mean, heights, xerr=error, capsize=3, label=name, **(style | {"linestyle": "none"})
        )
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.5, -0.5)
    for edge in range(1, len(methods)):
        axes.axhline(edge - 0.5, color="#dddddd", linewidth=0.8)
    axes.set_xlabel(METRICS.get(metric, metric))
    axes.grid(axis="x", alpha=0.3)
    legend_above(figure, [axes])
    return figure


def reliability(bins: Mapping[str, Bins]) -> Figure:
    """Draw how often predictions are right against how sure they are, and how sure they are.

    Args:
        bins: name -> `pyrofl.metrics.calibration_bins` of one axis, [bins].
    """
    figure = canvas(4.8, 5.4)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color="#999999", linewidth=1, label="calibrated")
    style = styles(bins)
    for name, found in bins.items():
        rows, sure, right = (np.asarray(value.cpu()) for value in found)
        full = rows > 0
        upper.plot(sure[full], right[full], label=name, clip_on=False, zorder=3, **style[name])
        edges = np.linspace(0, 1, len(rows) + 1)
        line = {n: style[name][n] for n in ("color", "linestyle")}
        lower.stairs(rows / rows.sum(), edges, linewidth=1.5, **line)
    upper.set(ylabel="share that is right", xlim=(0, 1), ylim=(0, 1.02))
    lower.set(xlabel="confidence of the prediction", ylabel="share of rows", ylim=(0, None))
    upper.grid(alpha=0.3)
    upper.legend(frameon=False, loc="upper left")
    return figure


def confidence(tau: Any, deviation: Any, size: Any) -> Figure:
    """Draw what pFedVEM learned about its clients: its confidence and their distance from it.

    Args:
        tau: [J], precision of each client.
        deviation: [J], ||mu_j - w||^2 / d, mean squared distance of its head from the server's.
        size: [J], training rows.
    """
    tau, deviation, size = (np.asarray(value, dtype=float) for value in (tau, deviation, size))
    share = 100 * tau / tau.sum()
    figure = canvas(11, 3.6)
    weights, distances, sizes = figure.subplots(1, 3)
    weights.hist(share, bins=20, color=COLOURS[0], edgecolor="white")
    weights.set(xlabel="weight at the server, tau_j / sum tau (%)", ylabel="clients")
    distances.hist(deviation, bins=20, color=COLOURS[2], edgecolor="white")
    distances.set(xlabel="mean squared deviation, ||mu_j - w||² / d", ylabel="clients")
    sizes.scatter(size, share, s=18, color=COLOURS[0], alpha=0.7)
    sizes.set(xlabel="training rows of the client", ylabel="weight at the server (%)")
    for axes in (weights, distances):
        axes.yaxis.get_major_locator().set_params(integer=True)
    equal: dict[str, Any] = {"color": COLOURS[1], "linestyle": "--", "label": "equal weights"}
    weights.axvline(100 / len(tau), **equal)
    sizes.axhline(100 / len(tau), **equal)
    legend_above(figure, [weights])
    return figure


def clients(size: Any, value: Any, metric: str) -> Figure:
    """Draw a metric of every client, [J], against its number of training rows, [J]."""
    size, value = np.asarray(size), np.asarray(value, dtype=float)
    figure = canvas(5.4, 3.8)
    axes = figure.subplots()
    axes.scatter(size, value, s=22, color=COLOURS[0], alpha=0.7)
    axes.axhline(
        float(np.nanmean(value)), color=COLOURS[1], linestyle="--", label="mean of clients"
    )
    if size.max() > 20 * size.min() > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="training rows of the client", ylabel=METRICS.get(metric, metric))
    axes.grid(alpha=0.3)
    legend_above(figure, [axes])
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the path's ending; the file is whole or not there."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
