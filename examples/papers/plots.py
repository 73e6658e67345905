"""Figures that follow those of single papers: pFedMB, FedBE and FedABML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl import figures
from pyrofl.figures import many, style
from pyrofl.figures.style import COLORS, panels, styles, with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["after_epochs", "alphas", "confidence_histogram", "distance", "histograms", "simplex"]

COLUMNS = 4  # of panels
USUAL_ROUNDS = 10  # of harness.Settings, which a file leaves out
SCORES = {  # column of a file -> its label
    "test": "training clients",
    "ood": "held-out clients",
    "after": "after fine-tuning",
}
TINIEST = np.finfo(float).tiny  # positive number
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]])  # of the simplex, in the plane


def alphas(history: Mapping[str, Any], names: Sequence[str] = ()) -> Figure:
    """Plot each client's branch weights by round (pFedMB, figure 3).

    Args:
        history: title -> branch weights [rounds, clients, branches], the first before round 1.
            Every title gets its block of panels, side by side.
        names: of each client, the title of its panel; those with the same one share it, each with
            its kind of line. Default: a panel per client.
    """
    many.refuse_lengths(history=history)
    weights = {title: np.asarray(value) for title, value in history.items()}
    rounds, clients, branches = next(iter(weights.values())).shape
    alike: dict[str, list[int]] = {}
    for j, name in enumerate(names or [f"client {j}" for j in range(clients)]):
        alike.setdefault(name, []).append(j)
    shown_names, some = many.fitting(alike, COLUMNS, 1.7, "panels")
    alike = {name: alike[name] for name in shown_names}
    columns = -(-len(alike) // max(5, -(-len(alike) // 4)))
    rows = -(-len(alike) // columns)
    figure = style.canvas(max(7.2, 2.1 * columns * len(weights)), 1.2 * rows + 1.4)
    blocks = figure.subfigures(1, len(weights), wspace=0.04, squeeze=False)[0]
    colors = styles(f"branch {b + 1}" for b in range(branches))
    shown: list[Axes] = []
    for block, (title, value) in zip(blocks, weights.items(), strict=True):
        block.suptitle(title, fontsize=style.pt(11))
        grid = block.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        grid[0].set(ylim=(-0.04, 1.04), yticks=(0, 0.5, 1), xlim=(0, max(1, rounds - 1)))
        for i, (axes, (name, members)) in enumerate(zip(grid, alike.items(), strict=False)):
            axes.set_title(style.plain(style.short(name, 24)), fontsize=style.pt(9), pad=3)
            axes.axhline(1 / branches, color="#bbbbbb", linewidth=0.8)
            for b, (branch, look) in enumerate(colors.items()):
                several = len(members) > 1 or branches <= len(COLORS)
                kinds = style.LINES if several else (look["linestyle"],)
                for j, kind in zip(members, cycle(kinds), strict=False):
                    label = branch if j == members[0] else ""
                    axes.plot(value[:, j, b], kind, lw=1.6, color=look["color"], label=label)
            axes.tick_params(labelsize=style.pt(8))
            if i + columns >= len(alike):
                style.mark_rounds(axes.xaxis)
                axes.tick_params(labelbottom=True)
            shown.append(axes)
        for axes in grid[len(alike) :]:
            axes.remove()
        block.supylabel("branch weight", fontsize=style.pt(10))
    shared = "kinds of lines: clients; " if max(map(len, alike.values())) > 1 else ""
    title = "Weight that each client gives to each branch, by round"
    return with_legend(figure, shown, colors, f"{shared}gray: equal weights", title=title + some)


def simplex(
    weights: Any,
    accuracy: Any,
    marks: Mapping[str, tuple[Any, float]] | None = None,
    corners: Sequence[str] = ("client 0", "client 1", "client 2"),
    ax: Axes | None = None,
) -> Figure:
    """Plot the accuracy of weighted averages of three clients' models (FedBE, figure 1).

    Args:
        weights: [N, 3], shares of the clients, which add up to 1.
        accuracy: [N], share of rows, of the model with these weights.
        marks: name -> (weights [3], accuracy). Without a place in the triangle, as an ensemble,
            weights is None; the color bar shows all of them.
        corners: names of the clients.
        ax: where to draw; None makes a figure.
    """
    from matplotlib.ticker import MaxNLocator

    found, marks = 100 * np.asarray(accuracy), marks or {}
    known = [*found, *(100 * value for _, value in marks.values())]
    figure, axes = style.one_panel(5.6, 4.8, ax, grid=None)
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
    note = "the color bar shows their accuracy too" if marks else ""
    title = "Accuracy of weighted averages of three clients' models"
    return with_legend(figure, [axes], note=note, ax=ax, title=title)


def confidence_histogram(models: Mapping[str, tuple[Any, Any]], bins: int = 15) -> Figure:
    """Plot histograms of confidence for right and wrong predictions (FedBE, figures 1 and 9).

    Args:
        models: title -> (confidence, right), both [N], or [members, N] for the mean over several
            models: probability of the predicted class, and whether it is the true one.
        bins: of confidence, equally wide.
    """
    many.refuse_lengths(models=models)
    for confidence, right in models.values():
        many.refuse_lengths(confidence=np.ravel(confidence), right=np.ravel(right))
        many.refuse_outside("confidence", confidence, 0.0, 1.0)
    shown, some = many.fitting(models, COLUMNS, 3.4, "models")
    wide = max(3.3, 4.2 / len(shown))
    figure, grid = panels(len(shown), COLUMNS, wide, 3.4, up="predictions (%)", sharey=True)
    edges = np.linspace(0, 1, bins + 1)
    for axes, title in zip(grid, shown, strict=True):
        confidence, right = models[title]
        sure, good = np.asarray(confidence).ravel(), np.asarray(right).ravel().astype(bool)
        for name, color, part in (("right", COLORS[0], good), ("wrong", COLORS[1], ~good)):
            share = 100 * np.histogram(sure[part], edges)[0] / len(sure)
            axes.stairs(share, edges, fill=True, color=color, alpha=0.35)
            axes.stairs(share, edges, color=color, linewidth=1.6, label=name)
        axes.set_title(f"{title}\n{100 * good.mean():.1f}% right", fontsize=style.pt(10))
        axes.set(xlim=(0, 1), xlabel="confidence (probability)")
        axes.xaxis.set_major_formatter("{x:g}")
    title = f"Confidence of right and of wrong predictions{some}"
    return with_legend(figure, grid, title=title)


def histograms(panels_of: Mapping[str, Mapping[str, Any]], across: str, bins: int = 20) -> Figure:
    """Plot histograms of a quantity over many seeds, such as ensemble gains (FedBE, figure 1).

    Args:
        panels_of: title -> name -> numbers [N], all in bins of the same ends; NaN are counted.
        across: what they are, with the unit.
        bins: equally wide.
    """
    values = [np.asarray(v).ravel() for of in panels_of.values() for v in of.values()]
    many.refuse_lengths(panels_of=values)
    all_values = np.concatenate(values)
    edges = np.histogram_bin_edges(all_values[np.isfinite(all_values)], bins)
    shown, some = many.fitting(panels_of, 3, 2.9)
    words: dict[str, Any] = {"across": across, "up": "seeds"}
    figure, grid = panels(len(shown), 3, max(3.6, 5.6 / len(shown)), 3.2, sharey=True, **words)
    looks = styles(name for of in panels_of.values() for name in of)
    for axes, title in zip(grid, shown, strict=True):
        for name, numbers in panels_of[title].items():
            count, color = np.histogram(np.asarray(numbers), edges)[0], looks[name]["color"]
            axes.stairs(count, edges, fill=True, color=color, alpha=0.35)
            axes.stairs(count, edges, color=color, linewidth=1.6, label=name)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(style.plain(title), fontsize=style.pt(10))
        axes.yaxis.set_major_locator(style.whole_numbers(6))
    note = many.missing(all_values)
    return with_legend(figure, grid, looks, note, title=f"Number of seeds by {across}{some}")


def after_epochs(
    epochs: Sequence[int],
    curves: Mapping[str, Any],
    metric: str = "accuracy",
    ax: Axes | None = None,
) -> Figure:
    """Plot a metric of new clients against the epochs of fine-tuning (FedABML).

    Args:
        epochs: [E], 0 for none.
        curves: method -> [seeds, E], means over clients.
        metric: what they measure.
        ax: where to draw; None makes a figure.
    """
    import pandas

    figure, axes = style.one_panel(5.8, 3.9, ax)
    looks = styles(curves)
    for name, look in looks.items():
        found = pandas.DataFrame(np.atleast_2d(np.asarray(curves[name])), columns=epochs)
        style.band(axes, found.agg(["mean", "sem"]).T, name, look)
    axes.set(xlabel="epochs of fine-tuning", ylabel=style.axis_label(metric))
    title = f"{style.heading(metric)} of new clients by epochs of fine-tuning"
    axes.xaxis.set_major_locator(style.whole_numbers(10))
    note = "mean ± one standard error over seeds" if axes.collections else ""
    return with_legend(figure, [axes], looks, note, ax, title)


def distance(measures: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot positive quantities against the round on a log scale (FedABML, figure 2).

    Args:
        measures: label of an axis -> method -> [runs, rounds], positive, the first before round 1.
            The band holds the geometric mean over runs with 95% confidence.
    """
    from scipy.stats import t

    many.refuse_lengths(measures=measures)
    for label, curves in measures.items():
        for values in curves.values():
            many.refuse_outside(label, values, TINIEST)
    shown, some = many.fitting(measures, 3, 3.7, "quantities")
    figure, grid = panels(len(shown), 3, max(4.4, 5.4 / len(shown)), 3.7)
    looks = styles(name for curves in measures.values() for name in curves)
    most = 1
    for axes, label in zip(grid, shown, strict=True):
        for name, values in measures[label].items():
            logs = np.log(np.atleast_2d(np.asarray(values)))
            runs, mean, ends = len(logs), logs.mean(0), None
            if runs > 2:  # of two runs the t band spans the page
                half = t.ppf(0.975, runs - 1) * logs.std(0, ddof=1) / runs**0.5
                ends = np.exp([mean - half, mean + half])
            style.line(axes, range(len(mean)), np.exp(mean), ends, name, looks[name])
            most = max(most, runs)
        axes.set_yscale("log")
        axes.set_ylabel(fill(label, 34))
        style.mark_rounds(axes.xaxis)
    note = f"geometric mean of {most} runs and its 95% confidence band" if most > 2 else ""
    title = "Distance by round" if len(measures) == 1 else "Distances by round"
    return with_legend(figure, grid, looks, note, title=title + some)


def by_size(methods: Mapping[str, tuple[Any, Any]]) -> Figure:
    """Plot the accuracy of clients against their number of rows (pFedVEM, figure 2).

    Args:
        methods: name -> (rows [clients], accuracy in percent [clients]).
    """
    figure, axes = style.one_panel(6.2, 4.0, None)
    looks = styles(methods)
    for name, (rows, accuracy) in methods.items():
        axes.plot(rows, accuracy, "o", ms=4, alpha=0.6, color=looks[name]["color"], label=name)
    axes.set(xlabel="training rows of the client", ylabel="accuracy (%)", xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    return with_legend(figure, [axes], title="Accuracy of clients by their number of rows")


def densities(panels_of: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot kernel density estimates of log10 of positive quantities (pFedVEM, figures 10, 11).

    Args:
        panels_of: quantity -> name -> numbers [N], positive.
    """
    from scipy.stats import gaussian_kde

    figure, grid = panels(len(panels_of), 2, 4.2, 3.2, up="density")
    looks = styles(name for of in panels_of.values() for name in of)
    for axes, (title, of) in zip(grid, panels_of.items(), strict=True):
        logs = {name: np.log10(np.asarray(values)) for name, values in of.items()}
        every = np.concatenate([*logs.values()])
        across = np.linspace(every.min() - 0.2, every.max() + 0.2, 200)
        for name, values in logs.items():
            axes.plot(
                across, gaussian_kde(values)(across), label=name, **looks[name] | {"marker": ""}
            )
        axes.set_xlabel(f"log10 of {title}")
    return with_legend(figure, grid, looks, title="Distributions over the clients")


def by_round(score: str) -> Callable[[Sequence[Mapping[str, str]], object], Figure]:
    """Return a function that plots a score of the rows of a study against the round.

    Args:
        score: beginning of the columns of the file, such as "after" of "after_20", whose numbers
            are percentages of the rounds.
    """

    def figure(lines: Sequence[Mapping[str, str]], _: object = None) -> Figure:
        shown = [
            {"method": line["row"], "seed": line["seed"], "adaptation": "none"}
            | {"model": SCORES.get(score, score)}
            | {"population": line["case"] or "all clients", "metric": "accuracy"}
            | {"round": max(1, round(int(name.split("_")[1]) * rounds_of(line) / 100))}
            | {"value": float(value)}
            for line in lines
            for name, value in line.items()
            if name.startswith(f"{score}_") and value
        ]
        return figures.curves(shown)

    return figure


def rounds_of(line: Mapping[str, str]) -> int:
    """Return the number of rounds of a line."""
    words = dict(word.split("=", 1) for word in line["settings"].split())
    return int(words.get("rounds", USUAL_ROUNDS))


def compared(*metrics: str) -> Callable[[Sequence[Mapping[str, str]], object], Figure]:
    """Return a function that plots scores of the rows of a table, in the first column of its file.

    The axis names the column, if there are several.

    Args:
        metrics: columns of the file; each gets a color.
    """

    def figure(lines: Sequence[Mapping[str, str]], _: object = None) -> Figure:
        shown = [
            {"method": line["row"], "seed": line["seed"], "adaptation": "none"}
            | {"model": SCORES.get(metric, metric)}
            | {"metric": "accuracy", "value": float(line[metric])}
            for line in lines
            for metric in metrics
            if line["case"] == lines[0]["case"] and line[metric]
        ]
        plot = figures.comparison(shown)
        if len({line["case"] for line in lines}) > 1:
            axes = plot.axes[0]
            axes.set_xlabel(f"{axes.get_xlabel()}; {lines[0]['case']}")
        return plot

    return figure
