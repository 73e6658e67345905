"""Figures of posteriors, such as shrinkage and what federation costs, and of checks of them.

A `Summary` is what `pyrofl.reference.cost` has in its columns mean, low and high. Places are
numbers between 0 and 1 that are uniform if all is well, of `checks.sbc` or `checks.pit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.figures import style
from pyrofl.figures.style import COLOURS, GREY, Summary, panels, styles, with_legend
from pyrofl.metrics import Bins, calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["cost", "courses", "forest", "lines", "pooling", "shrinkage"]
__all__ += ["coverage", "narrowing", "predictive_checks", "ranks", "reliability_by_client"]

BAND = 0.99
MOST_ROWS = 30  # that can be read one by one
TARGETS = {"difference": (0.0, 0.2), "ratio": (1.0, 0.15)}  # what is equal, and what is near it
NEAR = "grey: shifts below 0.2 sds, ratios within 15%"
EXTREME = 0.025  # p values that are marked, at either end


def cost(table: Any, names: tuple[str, str] = ("federated", "NUTS")) -> Figure:
    """Draw what federation costs: both posteriors, the shift of means and the ratio of spreads.

    Args:
        table: what `pyrofl.reference.cost` returns, or some of its rows. Several variables are
            drawn in standard deviations, one in its own unit. Where there are more than 30 rows,
            posteriors are left out, and every variable gets a lane, in which a dot is a row.
        names: of the two fits.
    """
    if len(table) > MOST_ROWS:
        return _lanes(table, names)
    figure = style.canvas(8.4, _height(len(table)))
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    ends = ("mean", "low", "high")
    mine, other = (tuple(table[w + c].to_numpy() for c in ends) for w in ("", "reference_"))
    left.set_xlabel("mean and 95% interval")
    if table["variable"].nunique() > 1:  # of different units, perhaps
        centre, unit = (table[c].to_numpy() for c in ("reference_mean", "reference_sd"))
        mine, other = (tuple((v - centre) / unit for v in fit) for fit in (mine, other))
        left.set_xlabel(f"mean and 95% interval\n(around the mean of {names[1]}, in its sds)")
    _intervals(left, list(map(str, table.index)), {names[0]: mine, names[1]: other})
    places = np.arange(len(table))
    for axes, column in ((middle, "difference"), (right, "ratio")):
        _apart(axes, column, table[column].to_numpy(), places, names)
    return with_legend(figure, [left], note=NEAR)


def _lanes(table: Any, names: tuple[str, str]) -> Figure:
    """Draw shifts and ratios of many rows: a lane for each variable, its worst row by name."""
    lanes = dict(list(table.groupby("variable", sort=False)))
    figure, grid = panels(2, 2, 4.2, 0.8 * len(lanes), (0, 1.4), grid=None, sharey=True)
    for axes, column in zip(grid, TARGETS, strict=True):
        for lane, part in enumerate(lanes.values()):
            values, target = part[column].to_numpy(), TARGETS[column][0]
            places = lane + 0.34 * np.sin(2.4 * np.arange(len(part)))
            _apart(axes, column, values, places, names)
            worst = int(np.abs(values - target).argmax())
            if len(part) > 1:
                _name(axes, str(part.index[worst]), values[worst], places[worst], target)
        farthest = float(np.abs(table[column] - TARGETS[column][0]).max())
        _reach(axes, column, 1.6 * farthest)  # with room for names
        style.name_rows(axes, list(lanes))
    grid[0].lines[1].set_label("a row of the variable")
    return with_legend(figure, grid[:1], note=NEAR)


def _name(axes: Axes, name: str, value: float, place: float, target: float) -> None:
    """Write a name beside a dot, on the side where there are no others."""
    right = value < target
    look: dict[str, Any] = {"fontsize": 8, "va": "center", "ha": "right" if right else "left"}
    box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}
    look |= {"xytext": (-6 if right else 6, 0), "textcoords": "offset points", "bbox": box}
    axes.annotate(style.plain(name), (value, place), **look)


def _apart(axes: Axes, column: str, values: Any, places: Any, names: tuple[str, str]) -> None:
    """Draw shifts or ratios at their places, and in grey what is near."""
    target, near = TARGETS[column]
    if not axes.lines:
        axes.axvspan(target - near, target + near, color=GREY, alpha=0.2, linewidth=0)
        axes.axvline(target, color=GREY, linewidth=0.8)
    axes.plot(values, places, "o", color=COLOURS[0], markersize=3.5)
    _reach(axes, column, float(np.abs(values - target).max()))
    words = {"difference": f"shift of the mean\n(in sds of {names[1]})"}
    axes.set_xlabel(words.get(column, f"ratio of sds\n({names[0]} / {names[1]})"))


def _reach(axes: Axes, column: str, farthest: float) -> None:
    """Let an axis go as far to both sides as what is near, twice, and what is farthest."""
    target, near = TARGETS[column]
    reach = 1.1 * max(2 * near, farthest)
    axes.set_xlim(max(target - reach, 0.0) if column == "ratio" else -reach, target + reach)


def forest(
    fits: Mapping[str, Summary],
    labels: Sequence[str],
    title: str,
    truth: Any = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the intervals of several fits below each other.

    Args:
        fits: name -> summary of its J rows; NaN leaves a gap.
        labels: of the J rows, from top to bottom.
        title: of the axis, with its unit.
        truth: values [J] that all fits are about.
        ax: where to draw; None makes a figure.
    """
    height = _height(len(labels) * max(1.0, 0.55 * len(fits)))
    figure, axes = style.one_panel(6.4, height, ax, grid=None)
    _intervals(axes, labels, fits)
    if truth is not None:
        axes.plot(truth, np.arange(len(labels)), "k*", markersize=7, label="later known", zorder=5)
    axes.set_xlabel(title)
    return with_legend(figure, [axes], ax=ax)


def shrinkage(
    names: Sequence[str],
    raw: Any,
    posterior: Summary,
    centre: float,
    title: str,
    truth: Any = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw how each client's own estimate is pulled towards the population.

    Args:
        names: of the J clients; they are sorted by their own estimate.
        raw: [J], the clients' own estimates.
        posterior: of the clients.
        centre: mean of the population.
        title: of the axis, with its unit.
        truth: [J], what turned out later.
        ax: where to draw; None makes a figure.
    """
    order = np.argsort(-np.asarray(raw), kind="stable")
    raw, mean, low, high = (np.asarray(v, dtype=float)[order] for v in (raw, *posterior))
    figure, axes = style.one_panel(6.4, _height(len(raw)), ax, grid=None)
    places = np.arange(len(raw))
    axes.axvline(centre, color=GREY, linestyle="--", label="population mean")
    axes.hlines(places, raw, mean, color=GREY, linewidth=0.8)
    axes.plot(raw, places, "o", mfc="white", color=COLOURS[1], label="own estimate")
    _intervals(axes, [names[i] for i in order], {"posterior": (mean, low, high)})
    if truth is not None:
        axes.plot(np.asarray(truth)[order], places, "k*", label="later known", zorder=5)
    axes.set_xlabel(title)
    return with_legend(figure, [axes], ax=ax)


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
    figure, grid = panels(2, 2, 4.2, 3.6, grid=None, sharey=True)
    size = np.asarray(size, dtype=float)
    # Clients of one size would hide each other.
    beside = size * np.exp(0.04 * np.sin(2.4 * np.arange(len(size))))
    fits = {"each on its own": (raw, COLOURS[1]), "hierarchical": (partial, COLOURS[0])}
    for axes, (name, ((mean, sd), colour)) in zip(grid, fits.items(), strict=True):
        axes.axhline(centre, color=GREY, linestyle="--", label="population mean")
        axes.errorbar(beside, mean, sd, fmt="o", ms=3, lw=0.8, color=colour, label=name, alpha=0.8)
        style.mark_sizes(axes.xaxis, size)
        axes.set_xlabel(unit)
    grid[0].set_ylabel(title)
    return with_legend(figure, grid, note="bars: one standard error or deviation")


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
    look: dict[str, Any] = {"grid": None, "across": across, "up": up, "sharex": True}
    figure, grid = panels(len(labels), columns, 2.1, 1.8, (0, 0.6), **look)
    for k, (axes, label) in enumerate(zip(grid, labels, strict=True)):
        mean, low, high = (np.asarray(v)[:, k] for v in posterior)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.errorbar(at, mean, (mean - low, high - mean), fmt="o", ms=3.5, color=COLOURS[0])
        axes.set_title(label, fontsize=10)
        axes.tick_params(labelsize=8, labelbottom=k + columns >= len(labels))
    return figure


def lines(clients: Mapping[str, tuple[Any, Any, Any, Any]], across: str, up: str) -> Figure:
    """Draw every client's rows, its line of least squares and its posterior of lines.

    Args:
        clients: name -> x [N] and y [N] of its rows, places [P], and draws [S, P] of its line.
        across: label of x, with its unit.
        up: label of y, with its unit.
    """
    columns = 6 if len(clients) <= 24 else 8
    look: dict[str, Any] = {"grid": None, "across": across, "up": up, "sharex": True}
    figure, grid = panels(len(clients), columns, 1.35, 1.25, (0.6, 0.8), **look, sharey=True)
    for axes, (name, (x, y, at, draws)) in zip(grid, clients.items(), strict=True):
        x, y, at, draws = (np.asarray(v, dtype=float) for v in (x, y, at, draws))
        low, high = np.quantile(draws, [0.025, 0.975], 0)
        axes.fill_between(at, low, high, color=COLOURS[0], alpha=0.25, lw=0, label="95% interval")
        axes.plot(at, draws.mean(0), color=COLOURS[0], label="posterior mean")
        if len(np.unique(x)) > 1:
            own = np.polynomial.Polynomial.fit(x, y, 1)(at)
            axes.plot(at, own, "--", color=COLOURS[1], lw=1, label="least squares, alone")
        axes.plot(x, y, ".", color="black", markersize=3)
        axes.set_title(style.plain(name), fontsize=8, pad=2)
        axes.tick_params(labelsize=7)
    return with_legend(figure, grid)


def ranks(places: Mapping[str, Any], bins: int = 20, columns: int = 4) -> Figure:
    """Draw histograms of places, with the band that holds 99% of the bins of uniform ones.

    Too few at both ends: intervals are too wide; too many: too narrow; a slope: a shifted posterior
    (Talts et al. 2018, figures 3 to 6).

    Args:
        places: title of a panel -> places [N]; NaN are left out.
        bins: equally wide.
        columns: of panels.
    """
    from scipy.stats import binom

    words: dict[str, Any] = {"across": "rank of the truth among the draws (share)", "sharex": True}
    figure, grid = panels(len(places), columns, 2.2, 1.7, (0.6, 0.9), grid=None, **words)
    band: dict[str, Any] = {"color": GREY, "alpha": 0.35, "lw": 0, "zorder": 3}
    for axes, (title, values) in zip(grid, places.items(), strict=True):
        known = _finite(values)
        counts, edges = np.histogram(known, bins, (0, 1))
        ends = binom.ppf([(1 - BAND) / 2, (1 + BAND) / 2], len(known), 1 / bins)
        axes.axhspan(*ends, label="99% of uniform ranks", **band)
        axes.stairs(counts, edges, fill=True, color=COLOURS[0], label="replications")
        axes.axhline(len(known) / bins, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=9)
        axes.set(xlim=(0, 1), xticks=(0, 0.5, 1), ylim=(0, None))
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_formatter("{x:g}")
    return with_legend(figure, grid)


def coverage(places: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw how often central intervals hold the truth, against how often they say they do.

    The band holds 99% of what chance makes of calibrated intervals, at every level for itself, for
    the shortest N.

    Args:
        places: title of a panel -> name of a curve -> places [N]; NaN are left out.
    """
    from scipy.stats import binom

    figure, grid = panels(len(places), len(places), 3.4, 4.0, (0.4, 0), sharey=True)
    levels = np.linspace(0, 1, 101)
    look = styles(name for curves in places.values() for name in curves)
    for axes, (title, curves) in zip(grid, places.items(), strict=True):
        known = {name: _finite(values) for name, values in curves.items()}
        count = min(map(len, known.values()))
        ends = [binom.ppf((1 + side * BAND) / 2, count, levels) / count for side in (-1, 1)]
        axes.fill_between(levels, *ends, color=GREY, alpha=0.3, lw=0, label="99% band of chance")
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1)
        for name, values in known.items():
            inside = (2 * np.abs(values - 0.5) <= levels[:, None]).mean(1)
            axes.plot(levels, inside, label=name, **look[name] | {"marker": None})
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the central interval")
    grid[0].set_ylabel("held the truth (share)")
    return with_legend(figure, grid, look)


def predictive_checks(table: Any, unit: Mapping[str, str] | None = None) -> Figure:
    """Draw a statistic of each client's rows beside what its posterior predicts of it.

    Args:
        table: what `checks.predictive_checks` returns, of one observed site: a panel for each
            statistic, a row for each client.
        unit: statistic -> label of its axis.
    """
    statistics = list(dict.fromkeys(table["statistic"]))
    names = list(dict.fromkeys(table["client"]))
    many, tall = len(statistics), (0.12 if len(names) > 40 else 0.24) * len(names)
    figure, grid = panels(many, many, 2.8, tall, (1, 1.4), grid=None, sharey=True)
    places = np.arange(len(names))
    for axes, statistic in zip(grid, statistics, strict=True):
        part = table[table["statistic"] == statistic].set_index("client").loc[names]
        low, high, seen, p = (part[c].to_numpy() for c in ("low", "high", "observed", "p"))
        axes.hlines(places, low, high, color=COLOURS[0], lw=3, alpha=0.4, label="95% predicted")
        axes.plot(part["mean"], places, "|", color=COLOURS[0], label="mean of the prediction")
        off = (p < EXTREME) | (p > 1 - EXTREME)
        extreme = (off, COLOURS[1], f"p below {EXTREME} or above {1 - EXTREME}")
        for chosen, colour, label in ((~off, "black", "observed"), extreme):
            if chosen.any():
                axes.plot(seen[chosen], places[chosen], "o", ms=4, color=colour, label=label)
        axes.set_xlabel((unit or {}).get(statistic, style.plain(statistic)))
        style.name_rows(axes, names)
    return with_legend(figure, grid)


def reliability_by_client(bins: Mapping[str, Bins], ax: Axes | None = None) -> Figure:
    """Draw beside each other how sure every client's model is, and how often it is right.

    Args:
        bins: client -> bins [bins], as `pyrofl.checks.calibration_by_client` returns them.
        ax: where to draw; None makes a figure.
    """
    figure, axes = style.one_panel(6.4, _height(len(bins)), ax, grid=None)
    names, places = [], np.arange(len(bins))
    sure, right, low, high = np.full((4, len(bins)), np.nan)
    for j, (name, found) in enumerate(bins.items()):
        count, confidence, share = (np.nan_to_num(np.asarray(value.cpu())) for value in found)
        rows = count.sum()
        names.append(f"{name} ({rows:.0f} rows, ECE {float(calibration_error(found)[0]):.2f})")
        if rows:
            sure[j], right[j] = (count @ values / rows for values in (confidence, share))
            low[j], high[j] = wilson(right[j], rows)
    error = np.maximum((right - low, high - right), 0.0)  # where all are right, but for rounding
    look: dict[str, Any] = {"fmt": "o", "color": COLOURS[0], "ms": 5, "lw": 1.6}
    axes.errorbar(right, places, xerr=error, **look, label="right (share), 95% interval")
    axes.plot(sure, places, "D", color=COLOURS[1], markersize=5, label="confidence (mean)")
    style.name_rows(axes, names)
    axes.set(xlabel="share of the client's rows; probability of the predicted class")
    axes.set_xlim(right=1.01)
    return with_legend(figure, [axes], ax=ax)


def wilson(share: float, rows: float) -> tuple[float, float]:
    """Return the ends of Wilson's 95% interval of a share of so many rows.

    >>> low, high = wilson(0.9, 10)
    >>> round(low, 3), round(high, 3)
    (0.596, 0.982)
    """
    z = 1.959964
    centre = (share + z**2 / (2 * rows)) / (1 + z**2 / rows)
    half = z * (share * (1 - share) / rows + z**2 / (4 * rows**2)) ** 0.5 / (1 + z**2 / rows)
    return centre - half, centre + half


def narrowing(
    sizes: Sequence[int],
    fits: Mapping[str, Summary],
    title: str,
    truth: float | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw how a new client's posterior narrows with its rows.

    Args:
        sizes: numbers of rows, [N].
        fits: name -> means and ends of intervals, each [N].
        title: of what is estimated, with its unit.
        truth: what it is.
        ax: where to draw; None makes a figure.
    """
    figure, axes = style.one_panel(5.8, 3.9, ax, grid="y")
    at, shift = np.arange(len(sizes)), 0.5 / len(fits)
    if truth is not None:
        axes.axhline(truth, color="black", linestyle="--", linewidth=1, label="truth")
    for i, (name, look) in enumerate(styles(fits).items()):
        mean, low, high = (np.asarray(v, dtype=float) for v in fits[name])
        look = look | {"linestyle": "none", "ms": 4, "capsize": 3, "label": name}
        place = at + shift * (i - (len(fits) - 1) / 2)
        axes.errorbar(place, mean, (mean - low, high - mean), **look)
    axes.set_xticks(at, list(map(str, sizes)))
    axes.set(xlabel="rows of the new client", ylabel=title)
    return with_legend(figure, [axes], note="mean and 95% interval", ax=ax)


def _intervals(axes: Axes, labels: Sequence[str], fits: Mapping[str, Summary]) -> None:
    """Draw a mean and an interval for each label and fit, from top to bottom."""
    shift = 0.6 / len(fits)
    for i, (name, summary) in enumerate(fits.items()):
        mean, low, high = (np.asarray(v, dtype=float) for v in summary)
        at = np.arange(len(labels)) + shift * (i - (len(fits) - 1) / 2)
        look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "lw": 1.2, "ms": 3.5}
        look |= {"fmt": style.MARKERS[i % len(style.MARKERS)], "label": name}
        axes.errorbar(mean, at, xerr=(mean - low, high - mean), **look)
    style.name_rows(axes, labels)


def _height(rows: float) -> float:
    """Return the height of a figure, in inches, for so many rows."""
    return 1.3 + max(0.11 if rows > 40 else 0.23, 1.5 / rows) * rows


def _finite(values: Any) -> Any:
    found = np.asarray(values, dtype=float).ravel()
    return found[np.isfinite(found)]
