"""Figures of clients: their data, their distances from the global model, their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.data.tables.wording import number_of
from pyrofl.figures import many, style
from pyrofl.figures.style import COLORS, GRAY, panels, styles, with_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["clients", "confidence", "differences", "partition"]

COLUMNS = 4  # of panels
EQUAL_WEIGHT_RATIO = 1.1  # weights of clients that differ by less are told to be equal


def partition(counts: Any, names: Sequence[str] = (), classes: Sequence[str] = ()) -> Figure:
    """Plot the number of training rows of each client and class.

    Args:
        counts: [clients, classes] numbers of rows; of one class alone there are no colors.
        names: of the clients; by default, and if they are many, their numbers.
        classes: names of the classes, likewise.
    """
    counts = np.asarray(counts)
    clients, kinds = counts.shape
    wide = float(np.clip(0.32 * clients, 3, 10))
    tall = float(np.clip(0.25 * kinds, 1.5, 6))  # inches for the classes
    heights = [1.0] + [tall] * (kinds > 1)
    figure = style.canvas(wide + 2, sum(heights) + 1.4)
    grid = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False).ravel()
    bars, *heat = grid
    bars.bar(range(clients), counts.sum(1), width=0.9, color="#777777")
    bars.set_ylabel("training rows")
    bars.yaxis.set_major_locator(style.whole_numbers(4))
    bars.spines[["top", "right"]].set_visible(False)
    style.label_places(grid[-1].xaxis, names, clients, "client", room=wide / clients)
    for axes in heat:
        _classes(figure, axes, counts, classes, tall / 0.15)
    of = f" in {kinds} classes" if kinds > 1 else ""
    return style.titled(figure, f"Training rows of {clients:,} client{'s' * (clients > 1)}{of}")


def _classes(
    figure: Figure, heat: Axes, counts: Any, classes: Sequence[str], aspect: float
) -> None:
    """Plot the number of rows of each client and class as a heat map."""
    from matplotlib.colors import PowerNorm

    edges = [np.arange(places + 1) - 0.5 for places in counts.shape]
    # The root shows the few rows of a class beside the many.
    look: dict[str, Any] = {"norm": PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))}
    look["linewidth"] = 0.5 if max(counts.shape) <= 40 else 0
    image = heat.pcolormesh(*edges, counts.T, cmap="Blues", edgecolors="white", **look)
    heat.invert_yaxis()
    style.label_places(heat.yaxis, classes, counts.shape[1], "class")
    bar = figure.colorbar(image, ax=heat, label="rows of the class", pad=0.01, aspect=aspect)
    bar.locator = style.whole_numbers(6)


def confidence(tau: Any, deviation: Any, size: Any) -> Figure:
    """Plot pFedVEM's weight of each client, and each client's distance from the base model.

    Weights are drawn from zero on, so that nearly equal ones look so.

    Args:
        tau: [J], precision of each client.
        deviation: [J], ||mu_j - w||^2 / d, mean squared distance of its head from the server's.
        size: [J], training rows.
    """
    tau, deviation, size = (np.asarray(value, dtype=float) for value in (tau, deviation, size))
    many.refuse_lengths(tau=tau, deviation=deviation, size=size)
    many.refuse_outside("tau", tau, 0.0)
    many.refuse_outside("deviation", deviation, 0.0)
    share = 100 * tau / tau.sum()
    figure, (weights, distances) = panels(2, 2, 4.4, 3.6, grid=None)
    weights.scatter(size, share, color=COLORS[0], **many.dots(len(size)))
    weights.axhline(100 / len(tau), color=COLORS[1], linestyle="--", label="equal weights")
    weights.set(ylim=(0, 1.15 * share.max()))
    weights.set_ylabel(r"weight $\tau_j \,/\, \Sigma\tau$ (%)")
    distances.scatter(size, deviation, color=COLORS[2], **many.dots(len(size)))
    distances.set(ylim=(0, 1.15 * deviation.max() or 1.0))
    distances.set_ylabel(r"squared deviation $\|\mu_j - w\|^2 \,/\, d$")
    for axes in (weights, distances):
        style.mark_sizes(axes.xaxis, size)
    times = share.max() / share.min()
    spread = (
        "all but equal"
        if times < EQUAL_WEIGHT_RATIO
        else f"the largest is {times:.3g} times the smallest"
    )
    note = f"weights of {share.min():.3g} to {share.max():.3g}%: {spread}"
    note = note if len(size) > 1 else "one client, so all of the weight"
    title = "Weight of each client at the server, and distance of its head from the server's"
    return with_legend(figure, [weights], note=note, title=title)


def clients(size: Any, value: Any, metric: str, ax: Axes | None = None) -> Figure:
    """Plot each client's metric against its number of training rows, for one or more models.

    Args:
        size: [J], training rows.
        value: [J], of the metric; NaN where a client was not tested. Or name -> [J] for several
            models: gray lines join what they reach for the same client.
        metric: what it is.
        ax: where to draw; None makes a figure.
    """
    size, named = np.asarray(size), isinstance(value, Mapping)
    models = {n: np.asarray(v, dtype=float) for n, v in (value if named else {"": value}).items()}
    many.refuse_lengths(size=size, **{name or "value": values for name, values in models.items()})
    figure, axes = style.one_panel(5.4, 3.8, ax)
    # Clients of one size would hide each other.
    beside = size * np.exp(0.03 * np.sin(2.4 * np.arange(len(size)))) if named else size
    joined = named and len(size) <= many.MAX_LARGE_DOTS
    if joined:
        ends = np.stack(list(models.values()))
        axes.vlines(beside, ends.min(0), ends.max(0), color=GRAY, linewidth=0.8, zorder=1)
    for name, style_of in styles(models).items():
        values, color = models[name], style_of["color"]
        look: dict[str, Any] = {"color": color, "marker": style_of["marker"]}
        axes.scatter(beside, values, label=name, **look, **many.dots(len(size)))
        if np.isfinite(values).any():
            middle, of = (
                float(np.nanmean(values)),
                f"mean of {name}" if named else "mean of clients",
            )
            line: dict[str, Any] = {"color": color if named else COLORS[1], "ls": "--", "lw": 1.2}
            axes.axhline(middle, label=f"{of}: {middle:.3g}", **line)
    style.mark_sizes(axes.xaxis, size)
    axes.set_ylabel(style.axis_label(metric))
    title = f"{style.heading(metric)} of each client, by its number of training rows"
    if len(models) == 2:
        (one, first), (other, second) = models.items()
        both = np.isfinite(first) & np.isfinite(second)
        more = int((second > first)[both].sum())
        if both.any():
            title = (
                f"{style.heading(metric)}: {other} above {one} for {more} of {both.sum()} clients"
            )
    lines = "" if joined or not named else "no lines between the models of a client"
    gaps = many.missing(np.concatenate(list(models.values())))
    return with_legend(figure, [axes], note=many.notes(lines, gaps), ax=ax, title=title)


def differences(
    sites: Mapping[str, Mapping[str, Sequence[float]]],
    unit: str,
    own: str = "own model",
) -> Figure:
    """Plot each client's score differences between federated models and its local model.

    Args:
        sites: model -> site -> difference, and the ends of its interval; blue is better, orange is
            worse, gray is inconclusive. Every model gets a panel, sites are from top to bottom; if
            there is no room for all names, they are sorted by difference, and the ends have names.
        unit: of the differences.
        own: name of the model that the others are compared with.
    """
    many.refuse_lengths(sites=sites)
    names = list(next(iter(sites.values())))
    columns = min(COLUMNS, len(sites))
    most = min(style.MAX_HEIGHT / -(-len(sites) // columns), many.height(len(names)) - 1)
    tall = min(0.4 + 0.22 * len(names), most)
    how: dict[str, Any] = {"sharex": True, "sharey": True}
    figure, grid = panels(len(sites), columns, 3.1, tall + 0.7, (1.2, 1.0), "x", **how)
    figure.supxlabel(f"difference from the client's {own} ({unit})", fontsize=style.pt(10))
    looks: dict[str, dict[str, Any]] = {
        "better than its own": {"color": COLORS[0], "marker": "o"},
        "worse": {"color": COLORS[1], "marker": "s"},
        "inconclusive": {"color": GRAY, "marker": "D"},
    }
    every = {model: np.array([of[n] for n in names], dtype=float).T for model, of in sites.items()}
    for model, (_, low, high) in every.items():
        many.refuse_swapped(model, low, high)
    is_finite = np.isfinite([values[0] for values in every.values()])
    total = np.nansum([values[0] for values in every.values()], axis=0)
    mean = np.where(is_finite.any(0), total / np.maximum(1, is_finite.sum(0)), np.nan)
    rows = many.rows(mean, min(many.named(), int(tall / 0.12)))
    for axes, (title, values) in zip(grid, every.items(), strict=True):
        middle, low, high = values[:, rows.order]
        kinds = np.where(low > 0, 0, np.where(high < 0, 1, 2))
        axes.axvline(0, color="black", linewidth=0.8)
        for places, size in rows.parts():
            for kind, (label, look) in enumerate(looks.items()):
                chosen = places[kinds[places] == kind]
                at, color = rows.at[chosen], (look["color"], size)
                axes.hlines(at, low[chosen], high[chosen], color=color, linewidth=1.6 * size)
                mark: dict[str, Any] = {"linestyle": "none", "ms": 5 * size, "label": label}
                axes.plot(middle[chosen], at, **look, **mark)
        rows.label(axes, names, "mean difference" if len(every) > 1 else "difference")
        better, worse = int((kinds == 0).sum()), int((kinds == 1).sum())
        name = style.plain(fill(title, 34))
        axes.set_title(f"{name}\nbetter: {better}, worse: {worse}", fontsize=style.pt(10))
    order = "" if rows.ends or len(names) == 1 else ", the smallest first"
    about = f"Is federation better than the {own}? {number_of(len(names), 'client')}{order}"
    note = many.notes(
        "bars: 95% intervals", many.missing(np.concatenate([v[0] for v in every.values()]))
    )
    return with_legend(figure, grid, looks, note, title=about)
