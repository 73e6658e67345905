"""Figures that single papers are known for: branches, ensembles, entropy, new clients, pruning.

As in `pyrofl.figures`, every function returns a matplotlib Figure of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.figures.style import (
    COLOURS,
    LINES,
    Row,
    axis_label,
    band,
    canvas,
    density,
    legend_above,
    log_band,
    mark_rounds,
    mean_and_error,
    styles,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])  # of the simplex, in the plane


def alphas(history: Mapping[str, Any], names: Sequence[str] = ()) -> Figure:
    """Draw how much every client uses each branch, round by round (pFedMB, figure 3).

    Args:
        history: title -> branch weights [rounds, clients, branches], the first before round 1.
            Every title gets its block of panels, side by side.
        names: of each client, the title of its panel; those with the same one share it, each with
            its kind of line. Default: a panel per client.
    """
    weights = {title: np.asarray(value) for title, value in history.items()}
    rounds, clients, branches = next(iter(weights.values())).shape
    panels: dict[str, list[int]] = {}
    for j, name in enumerate(names or [f"client {j}" for j in range(clients)]):
        panels.setdefault(name, []).append(j)
    columns = -(-len(panels) // max(5, -(-len(panels) // 4)))
    rows = -(-len(panels) // columns)
    figure = canvas(max(7.2, 2.1 * columns * len(weights)), 1.2 * rows + 1.4)
    blocks = figure.subfigures(1, len(weights), wspace=0.04, squeeze=False)[0]
    colours = styles(f"branch {b + 1}" for b in range(branches))
    shown: list[Axes] = []
    for block, (title, value) in zip(blocks, weights.items(), strict=True):
        block.suptitle(title, fontsize=11)
        grid = block.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        grid[0].set(ylim=(-0.04, 1.04), yticks=(0, 0.5, 1), xlim=(0, max(1, rounds - 1)))
        for i, (axes, (name, members)) in enumerate(zip(grid, panels.items(), strict=False)):
            axes.set_title(name, fontsize=9, pad=3)
            axes.axhline(1 / branches, color="#bbbbbb", linewidth=0.8)
            for b, (branch, look) in enumerate(colours.items()):
                for m, j in enumerate(members):
                    line = {"color": look["color"], "linestyle": LINES[m % len(LINES)]}
                    axes.plot(value[:, j, b], lw=1.6, label="" if m else branch, **line)
            axes.tick_params(labelsize=8)
            if i + columns >= len(panels):
                mark_rounds(axes.xaxis)
                axes.tick_params(labelbottom=True)
            shown.append(axes)
        for axes in grid[len(panels) :]:
            axes.remove()
        block.supylabel("branch weight", fontsize=10)
    shared = "kinds of lines: clients; " if len(panels) < clients else ""
    legend_above(figure, shown, colours, f"{shared}grey: equal weights")
    return figure


def simplex(
    weights: Any,
    accuracy: Any,
    marks: Mapping[str, tuple[Any, float]] | None = None,
    corners: Sequence[str] = ("client 0", "client 1", "client 2"),
) -> Figure:
    """Draw the accuracy of weighted means of three clients' models (FedBE, figure 1).

    Args:
        weights: [N, 3], shares of the clients, which add up to 1.
        accuracy: [N], share of rows, of the model with these weights.
        marks: name -> (weights [3], accuracy). Without a place in the triangle, as an ensemble,
            weights is None; the colour bar shows all of them.
        corners: names of the clients.
    """
    from matplotlib.ticker import MaxNLocator

    found, marks = 100 * np.asarray(accuracy), marks or {}
    known = [*found, *(100 * value for _, value in marks.values())]
    figure = canvas(5.6, 4.8)
    axes = figure.subplots()
    x, y = (np.asarray(weights) @ CORNERS).T
    levels = np.linspace(min(known), max(*known, min(known) + 0.1), 101)
    image = axes.tricontourf(x, y, found, levels=levels)
    axes.plot(x, y, ".", color="white", markersize=1.5, alpha=0.5)
    axes.plot(*CORNERS[[0, 1, 2, 0]].T, color="black", linewidth=1)
    bar = figure.colorbar(image, ax=axes, label="accuracy (%)", shrink=0.85, pad=0.06)
    bar.locator = MaxNLocator(8, steps=[1, 2, 5, 10])
    for i, (name, (place, value)) in enumerate(marks.items()):
        look: dict[str, Any] = {"color": "white", "mec": "black", "ls": "none", "zorder": 4}
        look |= {"marker": "*oDsP^v"[i % 7], "ms": max(6, 13 - 3 * i)}  # the last lies on top
        x, y = ([], []) if place is None else (np.asarray(place) @ CORNERS)[:, None]
        axes.plot(x, y, label=f"{name}: {100 * value:.1f}%", **look)
        bar.ax.plot([0.5], [100 * value], clip_on=False, **look)
    for name, (x, y) in zip(corners, CORNERS, strict=True):
        axes.annotate(name, (x, y), (0, 6 if y else -14), textcoords="offset points", ha="center")
    axes.set(aspect="equal", xmargin=0.09, ymargin=0.09)
    axes.set_axis_off()
    if marks:
        legend_above(figure, [axes], note="the colour bar shows where they are on the scale")
    return figure


def confidence_histogram(panels: Mapping[str, tuple[Any, Any]], bins: int = 15) -> Figure:
    """Draw how confident right and wrong predictions are (FedBE, figures 1 and 9).

    Args:
        panels: title -> (confidence, right), both [N], or [members, N] for the mean over several
            models: probability of the predicted class, and whether it is the true one.
        bins: of confidence, equally wide.
    """
    figure = canvas(max(4.2, 3.3 * len(panels)), 3.4)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    edges = np.linspace(0, 1, bins + 1)
    for axes, (title, (confidence, right)) in zip(grid, panels.items(), strict=True):
        sure, good = np.asarray(confidence).ravel(), np.asarray(right).ravel().astype(bool)
        for name, colour, part in (("right", COLOURS[0], good), ("wrong", COLOURS[1], ~good)):
            share = 100 * np.histogram(sure[part], edges)[0] / len(sure)
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35)
            axes.stairs(share, edges, color=colour, linewidth=1.6, label=name)
        axes.set_title(f"{title}\n{100 * good.mean():.1f}% right", fontsize=10)
        axes.set(xlim=(0, 1), xlabel="confidence")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("predictions (%)")
    legend_above(figure, grid)
    return figure


def densities(entropy: Mapping[str, Sequence[Any]], classes: int) -> Figure:
    """Draw how uncertain clients are about each data set (FedABML, figures 5 and 6).

    Args:
        entropy: data set -> of every client, the entropy of its predictions [N], in nats. Every
            client is a thin line, all together a thick one.
        classes: K; entropy is between 0 and log K.
    """
    figure = canvas(5.8, 3.8)
    axes = figure.subplots()
    top = float(np.log(classes))
    for (name, values), look in zip(entropy.items(), styles(entropy).values(), strict=True):
        line = {key: look[key] for key in ("color", "linestyle")}
        for value in values:
            axes.plot(*density(np.asarray(value), top), color=look["color"], lw=0.7, alpha=0.4)
        every = np.concatenate([np.asarray(value).ravel() for value in values])
        axes.plot(*density(every, top), linewidth=2.4, label=name, **line)
    axes.set(xlim=(0, top), ylim=(0, None), ylabel="density")
    axes.set_xlabel(f"entropy of the prediction (nats; at most log {classes} = {top:.2f})")
    axes.grid(alpha=0.3)
    legend_above(figure, [axes], note="thin: one client each; thick: all of them")
    return figure


def after_epochs(
    epochs: Sequence[int], curves: Mapping[str, Any], metric: str = "accuracy"
) -> Figure:
    """Draw how fast new clients learn: a metric against epochs of fine-tuning (FedABML).

    Args:
        epochs: [E], 0 for none.
        curves: method -> [seeds, E], means over clients.
        metric: what they measure.
    """
    figure = canvas(5.8, 3.9)
    axes = figure.subplots()
    for (name, values), look in zip(curves.items(), styles(curves).values(), strict=True):
        seeds = np.atleast_2d(np.asarray(values)).T.tolist()
        band(axes, dict(zip(epochs, seeds, strict=True)), name, look)
    axes.set(xlabel="epochs of fine-tuning", ylabel=axis_label(metric))
    axes.xaxis.set_major_locator(whole_numbers(10))
    axes.grid(alpha=0.3)
    note = "mean ± one standard error over seeds" if axes.collections else ""
    legend_above(figure, [axes], note=note)
    return figure


def distance(panels: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw curves that shrink by orders of magnitude, on a scale of logarithms (FedABML, figure 2).

    Args:
        panels: what is measured -> method -> [runs, rounds], positive, the first before round 1.
            The band holds the geometric mean over runs with 95% confidence.
    """
    figure = canvas(max(5.4, 4.4 * len(panels)), 3.7)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    style = styles(name for curves in panels.values() for name in curves)
    runs = 1
    for axes, (label, curves) in zip(grid, panels.items(), strict=True):
        for name, values in curves.items():
            runs = max(runs, log_band(axes, np.atleast_2d(np.asarray(values)), name, style[name]))
        axes.set_yscale("log")
        axes.set_title(label, fontsize=10)
        mark_rounds(axes.xaxis)
        axes.grid(alpha=0.3)
    note = f"geometric mean of {runs} runs and its 95% confidence band" if runs > 2 else ""
    legend_above(figure, grid, style, note)
    return figure


def sparsity(rows: Iterable[Row], metric: str = "accuracy") -> Figure:
    """Draw what leaving weights out costs and saves (MetaVD's pruning).

    Args:
        rows: of one run each: "method", "seed", "sparsity" (share of weights left out), "bytes"
            (sent by a client in a round), the metric, and perhaps "setting", such as the
            threshold. The settings of a method are joined by a line.
        metric: the one to draw.
    """
    points: dict[str, dict[Any, list[Row]]] = {}
    for row in rows:
        points.setdefault(row["method"], {}).setdefault(row.get("setting"), []).append(row)
    figure = canvas(8.8, 3.8)
    grid = figure.subplots(1, 2, sharey=True)
    sides = (("sparsity", 100, "weights left out (%)"), ("bytes", 1e-6, "sent by a client (MB)"))
    seeds = max(len(runs) for settings in points.values() for runs in settings.values())
    for axes, (column, unit, label) in zip(grid, sides, strict=True):
        for (name, settings), look in zip(points.items(), styles(points).values(), strict=True):
            found = [
                mean_and_error([unit * run[column] for run in runs])
                + mean_and_error([run[metric] for run in runs])
                for runs in settings.values()
            ]
            x, wide, y, high = np.array(sorted(found)).T
            axes.errorbar(x, y, high, wide, capsize=2 * (seeds > 1), label=name, **look)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    grid[0].set_ylabel(axis_label(metric))
    note = f"mean ± one standard error over {seeds} seeds" if seeds > 1 else ""
    legend_above(figure, grid, points, note)
    return figure
