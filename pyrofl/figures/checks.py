"""Figures of posterior checks: ranks, coverage, predictions, calibration, new clients.

Places are numbers between 0 and 1 that are uniform if all is well, of `checks.sbc` or `checks.pit`.
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

__all__ = ["coverage", "coverage_by_client", "narrowing", "predictive_checks", "ranks"]
__all__ += ["reliability_by_client"]

BAND = 0.99
POOLINGS = {
    "client": "threshold of the client",
    "pooled": "pooled threshold",
    "new_client": "threshold for new clients",
}
EXTREME = 0.025  # p values that are marked, at either end


def ranks(places: Mapping[str, Any], bins: int = 20, columns: int = 4) -> Figure:
    """Plot histograms of ranks from posterior checks, with a 99% band expected for uniform ranks.

    Too few at both ends: intervals are too wide; too many: too narrow; a slope: a shifted posterior
    (Talts et al. 2018, figures 3 to 6).

    Args:
        places: title of a panel -> places [N]; NaN are left out.
        bins: equally wide.
        columns: of panels.
    """
    from scipy.stats import binom

    words: dict[str, Any] = {"across": "rank of the true value among the draws (fraction)"}
    words |= {"up": "replications", "sharex": True, "sharey": True}
    figure, grid = panels(len(places), columns, 2.2, 1.7, (0.6, 0.9), grid=None, **words)
    band: dict[str, Any] = {"color": GREY, "alpha": 0.35, "lw": 0, "zorder": 3}
    for axes, (title, values) in zip(grid, places.items(), strict=True):
        known = _finite(values)
        counts, edges = np.histogram(known, bins, (0, 1))
        ends = binom.ppf([(1 - BAND) / 2, (1 + BAND) / 2], len(known), 1 / bins)
        axes.axhspan(*ends, label="99% of uniform ranks", **band)
        axes.stairs(counts, edges, fill=True, color=COLOURS[0], label="replications")
        axes.axhline(len(known) / bins, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=style.pt(9))
        axes.set(xlim=(0, 1), xticks=(0, 0.5, 1))
        axes.tick_params(labelsize=style.pt(8))
        axes.xaxis.set_major_formatter("{x:g}")
    grid[0].set_ylim(0, None)
    title = "Rank of the true value among posterior draws: flat if the posterior is calibrated"
    return with_legend(figure, grid, title=title)


def coverage(places: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the observed coverage of central posterior intervals against their nominal coverage.

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
        axes.set_title(title, fontsize=style.pt(10))
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the central interval")
    grid[0].set_ylabel("contain the true value (fraction)")
    title = "How often posterior intervals contain the true value"
    return with_legend(figure, grid, look, title=title)


def coverage_by_client(table: Any, ax: Axes | None = None) -> Figure:
    """Plot the coverage of each client's prediction sets, with the range expected by chance.

    Args:
        table: `Conformal.frame()`, with test rows. Every client gets a lane; every kind of
            threshold a color, its coverage a mark on the 95% range of exchangeable rows.
        ax: where to draw; None makes a figure.

    Raises:
        ValueError: if the table has no test rows.
    """
    table = table[table["test_rows"] > 0]
    if not len(table):
        raise ValueError("the table has no test rows, so no coverage; expected share below 1")
    sizes = table.groupby("client", sort=False)["test_rows"].first()
    off = ~table["coverage"].between(table["low"], table["high"])
    lanes = {name: lane for lane, name in enumerate(sizes.index)}
    looks = styles(POOLINGS[kind] for kind in table["pooling"].unique())
    figure, axes = style.one_panel(6.4, style.height(1.6 * len(lanes)), ax, grid=None)
    for i, (kind, part) in enumerate(table.groupby("pooling", sort=False)):
        look = looks[POOLINGS[str(kind)]] | {"linestyle": "none", "markersize": 5}
        look["markersize"] = 5 * style.thin(len(lanes))
        at = part["client"].map(lanes) + 0.36 * (i - (len(looks) - 1) / 2) / len(looks)
        wide: dict[str, Any] = {"lw": 5 * style.thin(len(lanes)), "alpha": 0.25}
        axes.hlines(at, part["low"], part["high"], color=look["color"], **wide)
        axes.plot(part["coverage"], at, label=POOLINGS[str(kind)], **look)
    axes.axvline(float(table["target"].iloc[0]), color="black", linewidth=0.8, linestyle=":")
    names = [f"{style.short(str(name), 24)} ({rows:.0f} rows)" for name, rows in sizes.items()]
    style.name_rows(axes, names, {lanes[name] for name in table["client"][off]})
    axes.set_xlabel("coverage (fraction of test rows)")
    note = "band: 95% range expected by chance; dotted: target"
    title = "Coverage of prediction sets: "
    title += f"{table['client'][off].nunique()} of {len(lanes)} clients outside the expected range"
    return with_legend(figure, [axes], note=note, ax=ax, title=title)


def predictive_checks(table: Any, unit: Mapping[str, str] | None = None) -> Figure:
    """Plot statistics of each client's data against their posterior predictive distribution.

    Args:
        table: what `checks.predictive_checks` returns, of one observed site: a panel for each
            statistic, a row for each client.
        unit: statistic -> label of its axis.
    """
    statistics = list(dict.fromkeys(table["statistic"]))
    names = list(dict.fromkeys(table["client"]))
    many, tall = len(statistics), style.height(len(names))
    figure, grid = panels(many, many, 2.8, tall - 1, (1, 1), grid=None, sharey=True)
    places, thin = np.arange(len(names)), style.thin(len(names))
    extremes = (table["p"] < EXTREME) | (table["p"] > 1 - EXTREME)
    marked = {names.index(name) for name in table["client"][extremes]}
    for axes, statistic in zip(grid, statistics, strict=True):
        part = table[table["statistic"] == statistic].set_index("client").loc[names]
        low, high, seen, p = (part[c].to_numpy() for c in ("low", "high", "observed", "p"))
        band: dict[str, Any] = {"color": COLOURS[0], "lw": 3 * thin, "alpha": 0.4}
        axes.hlines(places, low, high, label="95% predicted", **band)
        middle: dict[str, Any] = {"color": COLOURS[0], "ms": 6 * thin}
        axes.plot(part["mean"], places, "|", label="mean of the prediction", **middle)
        off = (p < EXTREME) | (p > 1 - EXTREME)
        extreme = (off, COLOURS[1], f"p below {EXTREME} or above {1 - EXTREME}")
        for chosen, colour, label in ((~off, "black", "observed"), extreme):
            if chosen.any():
                axes.plot(seen[chosen], places[chosen], "o", ms=4 * thin, color=colour, label=label)
        axes.set_xlabel((unit or {}).get(statistic, style.plain(statistic)))
        style.name_rows(axes, names, marked)
    for axes in grid[1:]:
        axes.set_ylabel("")
    title = f"Data and predictions: extreme for {len(marked)} of {len(names)} clients"
    return with_legend(figure, grid, title=title)


def reliability_by_client(bins: Mapping[str, Bins], ax: Axes | None = None) -> Figure:
    """Plot every client's accuracy, with a 95% interval, and its mean confidence.

    Args:
        bins: client -> bins [bins], as `pyrofl.checks.calibration_by_client` returns them.
        ax: where to draw; None makes a figure.
    """
    from scipy.stats import binomtest

    figure, axes = style.one_panel(6.4, style.height(len(bins)), ax, grid=None)
    names, places = [], np.arange(len(bins))
    sure, right, low, high = np.full((4, len(bins)), np.nan)
    for j, (name, found) in enumerate(bins.items()):
        count, confidence, share = (np.nan_to_num(np.asarray(value.cpu())) for value in found)
        rows = count.sum()
        error = float(calibration_error(found)[0])
        names.append(f"{style.short(name, 18)} ({rows:.0f} rows, ECE {error:.2f})")
        if rows:
            sure[j], right[j] = (count @ values / rows for values in (confidence, share))
            test = binomtest(round(right[j] * rows), int(rows))
            low[j], high[j] = test.proportion_ci(method="wilson")
    bars = np.maximum((right - low, high - right), 0.0)  # where all are right, but for rounding
    thin = style.thin(len(bins))
    look: dict[str, Any] = {"fmt": "o", "color": COLOURS[0], "ms": 5 * thin, "lw": 1.6 * thin}
    axes.errorbar(right, places, xerr=bars, **look, label="accuracy, 95% interval")
    axes.plot(sure, places, "D", color=COLOURS[1], markersize=5 * thin, label="mean confidence")
    off = np.flatnonzero((sure < low) | (sure > high))
    style.name_rows(axes, names, off)
    axes.set(xlabel="accuracy and confidence (fraction of rows)")
    axes.set_xlim(right=1.01)
    title = "Confidence and accuracy of each client: "
    title += f"confidence is outside the interval for {len(off)} of {len(bins)}"
    return with_legend(figure, [axes], ax=ax, title=title)


def narrowing(
    sizes: Sequence[int],
    fits: Mapping[str, Summary],
    title: str,
    truth: float | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Plot the posterior interval of a new client against its number of rows.

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
    about = "Posterior of a new client by its number of rows"
    return with_legend(figure, [axes], note="mean and 95% interval", ax=ax, title=about)


def _finite(values: Any) -> Any:
    found = np.asarray(values, dtype=float).ravel()
    return found[np.isfinite(found)]
