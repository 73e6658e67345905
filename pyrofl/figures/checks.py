"""Figures of posterior checks: ranks, coverage, predictions, calibration, new clients.

Places are numbers between 0 and 1 that are uniform if all is well, of `checks.sbc` or `checks.pit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.data.tables.wording import number_of
from pyrofl.figures import many, style
from pyrofl.figures.style import COLORS, GRAY, Summary, panels, styles, with_legend
from pyrofl.metrics import Bins, calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["coverage", "coverage_by_client", "entropies", "narrowing", "predictive_checks"]
__all__ += ["ranks", "reliability_by_client"]

BAND = 0.99
POOLINGS = {
    "client": "threshold of the client",
    "pooled": "pooled threshold",
    "new_client": "threshold for new clients",
}
EXTREME_P = 0.025  # p values that are marked, at either end
MARKED = f"p below {EXTREME_P} or above {1 - EXTREME_P}"
CHECKED = ("low", "high", "mean", "observed", "p")
COLUMNS = 4  # of panels
MAX_CLIENT_LINES = 60  # clients with a line of their own
ROUNDING = 1e-4  # of entropies in single precision


def ranks(places: Mapping[str, Any], bins: int = 20, columns: int = 4) -> Figure:
    """Plot histograms of ranks from posterior checks, with a 99% band expected for uniform ranks.

    Too few at both ends: intervals are too wide; too many: too narrow; a slope: a shifted posterior
    (Talts et al. 2018, figures 3 to 6).

    Args:
        places: title of a panel -> places [N]; NaN are counted, but left out. If there are more
            panels than a page has room for, the least uniform are drawn.
        bins: equally wide.
        columns: of panels.
    """
    from scipy.stats import binom

    words: dict[str, Any] = {"across": "rank of the true value among the draws (fraction)"}
    words |= {"up": "replications", "sharex": True, "sharey": True}
    many.refuse_lengths(places=places)
    every = [np.histogram(_finite(values), bins, (0, 1))[0] for values in places.values()]
    uneven = [array.std() / max(1.0, array.mean()) ** 0.5 for array in every]
    shown, some = many.worst([*places], uneven, columns, 1.7, "parameters")
    figure, grid = panels(len(shown), columns, 2.2, 1.7, (0.6, 0.9), grid=None, **words)
    band: dict[str, Any] = {"color": GRAY, "alpha": 0.35, "lw": 0, "zorder": 3}
    for axes, title in zip(grid, shown, strict=True):
        finite_ranks = _finite(places[title])
        counts, edges = np.histogram(finite_ranks, bins, (0, 1))
        ends = binom.ppf([(1 - BAND) / 2, (1 + BAND) / 2], len(finite_ranks), 1 / bins)
        axes.axhspan(*ends, label="99% of uniform ranks", **band)
        axes.stairs(counts, edges, fill=True, color=COLORS[0], label="replications")
        axes.axhline(len(finite_ranks) / bins, color="black", linewidth=0.8)
        axes.set_title(style.plain(style.short(title, 30)), fontsize=style.pt(9))
        axes.set(xlim=(0, 1), xticks=(0, 0.5, 1))
        axes.tick_params(labelsize=style.pt(8))
        axes.xaxis.set_major_formatter("{x:g}")
    grid[0].set_ylim(0, None)
    title = "Rank of the true value among posterior draws: flat if the posterior is calibrated"
    note = _gaps(places[title] for title in shown)
    return with_legend(figure, grid, note=note, title=title + some)


def coverage(places: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot the observed coverage of central posterior intervals against their nominal coverage.

    The band holds 99% of what chance makes of calibrated intervals, at every level for itself, for
    the shortest N.

    Args:
        places: title of a panel -> name of a curve -> places [N]; NaN are counted, but left out. If
            there are more panels than a page has room for, those that deviate most are drawn.
    """
    from scipy.stats import binom

    levels = np.linspace(0, 1, 101)
    many.refuse_lengths(places=places)
    inside = {
        title: {name: _inside(_finite(values), levels) for name, values in curves.items()}
        for title, curves in places.items()
    }
    off = [max(np.abs(v - levels).max() for v in curves.values()) for curves in inside.values()]
    tall = 4.0 if len(places) <= COLUMNS else 2.8
    shown, some = many.worst([*places], off, COLUMNS, tall, "parameters")
    look = styles(name for title in shown for name in places[title])
    up = "intervals that contain\nthe true value (fraction)"
    figure, grid = panels(len(shown), COLUMNS, 3.3, tall, (0.4, 0), up=up, sharey=True)
    for axes, title in zip(grid, shown, strict=True):
        counts = [len(_finite(values)) for values in places[title].values()]
        count = min((count for count in counts if count), default=1)
        ends = [binom.ppf((1 + side * BAND) / 2, count, levels) / count for side in (-1, 1)]
        axes.fill_between(levels, *ends, color=GRAY, alpha=0.3, lw=0, label="99% band of chance")
        axes.plot([0, 1], [0, 1], color=GRAY, linewidth=1)
        for name, curve in inside[title].items():
            axes.plot(levels, curve, label=name, **look[name] | {"marker": None})
        axes.set_title(style.plain(style.short(title)), fontsize=style.pt(10))
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the central interval")
    note = _gaps(values for title in shown for values in places[title].values())
    title = f"How often posterior intervals contain the true value{some}"
    return with_legend(figure, grid, look, note=note, title=title)


def coverage_by_client(table: Any, ax: Axes | None = None) -> Figure:
    """Plot the coverage of each client's prediction sets, with the range expected by chance.

    Args:
        table: `Conformal.frame()`, with test rows. Every client gets a lane; every kind of
            threshold a color, its coverage a mark on the 95% range of exchangeable rows.
        ax: where to draw; None makes a figure.

    Raises:
        ValueError: if the table has no test rows.
    """
    untested = table["client"].nunique()
    table = table[table["test_rows"] > 0]
    if not len(table):
        raise ValueError("the table has no test rows, so no coverage; expected share below 1")
    sizes = table.groupby("client", sort=False)["test_rows"].first()
    untested -= len(sizes)
    has_coverage = table["coverage"].notna()
    off = has_coverage & ~table["coverage"].between(table["low"], table["high"])
    kinds = dict(list(table.groupby("pooling", sort=False)))
    looks = styles(POOLINGS[str(kind)] for kind in kinds)
    rows = many.rows(table.groupby("client", sort=False)["coverage"].mean())
    height = many.height(len(sizes), 1 + 0.3 * len(kinds))
    figure, axes = style.one_panel(6.4, height, ax, grid=None)
    for i, (kind, part) in enumerate(kinds.items()):
        label, part = POOLINGS[str(kind)], part.set_index("client").reindex(sizes.index[rows.order])
        at = rows.at + 0.36 * rows.step * (i - (len(looks) - 1) / 2) / len(looks)
        look, place = looks[label] | {"linestyle": "none"}, at
        low, high, covered = (part[c].to_numpy() for c in ("low", "high", "coverage"))
        for places, size in rows.parts():
            at = place[places]
            wide: dict[str, Any] = {"lw": 5 * size**2, "color": (look["color"], 0.25 * size**2)}
            axes.hlines(at, low[places], high[places], **wide)
            axes.plot(covered[places], at, label=label, **look | {"markersize": 5 * size})
    axes.axvline(float(table["target"].iloc[0]), color="black", linewidth=0.8, linestyle=":")
    names = [f"{style.short(str(name), 24)} ({rows:.0f} rows)" for name, rows in sizes.items()]
    rows.label(axes, names, "coverage")
    axes.set_xlabel("coverage (fraction of test rows)")
    left = f"{number_of(untested, 'client')} without test rows not shown" if untested else ""
    gaps = many.missing(table["coverage"])
    note = many.notes("band: 95% range expected by chance; dotted: target", left, gaps)
    title = "Coverage of prediction sets: "
    title += f"{table['client'][off].nunique()} of {len(sizes)} clients outside the expected range"
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
    each = {s: table[table["statistic"] == s].set_index("client").loc[names] for s in statistics}
    p = np.stack([part["p"].to_numpy(dtype=float) for part in each.values()])
    extremes = np.nan_to_num(np.abs(p - 0.5), nan=-1.0).argmax(0)
    rows = many.rows(np.take_along_axis(p, extremes[None], 0)[0])
    tall = many.height(len(names))
    shown, some = many.fitting(statistics, COLUMNS, tall, "statistics")
    figure, grid = panels(len(shown), COLUMNS, 2.8, tall - 1, (1, 1), grid=None, sharey=True)
    off = (p < EXTREME_P) | (p > 1 - EXTREME_P)
    for axes, statistic in zip(grid, shown, strict=True):
        part = each[statistic].iloc[rows.order]
        low, high, mean, seen, p = (part[c].to_numpy(dtype=float) for c in CHECKED)
        extreme = (p < EXTREME_P) | (p > 1 - EXTREME_P)
        for places, size in rows.parts():
            at, off_here = rows.at[places], extreme[places]
            band: dict[str, Any] = {"color": (COLORS[0], 0.4 * size), "lw": 3 * size**2}
            axes.hlines(at, low[places], high[places], label="95% predicted", **band)
            middle: dict[str, Any] = {"color": COLORS[0], "ms": 6 * size**2}
            axes.plot(mean[places], at, "|", label="mean of the prediction", **middle)
            marks = ((~off_here, "black", "observed"), (off_here, COLORS[1], MARKED))
            for chosen, color, label in marks:
                if chosen.any():
                    dot: dict[str, Any] = {"ms": 4 * size, "color": color, "label": label}
                    axes.plot(seen[places][chosen], at[chosen], "o", **dot)
        axes.set_xlabel((unit or {}).get(statistic, style.plain(statistic)))
        rows.label(axes, names, "their most extreme p")
    title = "Data and predictions: extreme for "
    title += f"{off.any(0).sum()} of {len(names)} clients{some}"
    note = many.missing(*(each[statistic]["observed"] for statistic in shown))
    return with_legend(figure, grid, note=note, title=title)


def reliability_by_client(bins: Mapping[str, Bins], ax: Axes | None = None) -> Figure:
    """Plot every client's accuracy, with a 95% interval, and its mean confidence.

    Args:
        bins: client -> bins [bins], as `pyrofl.checks.calibration_by_client` returns them.
        ax: where to draw; None makes a figure.
    """
    from scipy.stats import binomtest

    names = []
    sure, right, low, high = np.full((4, len(bins)), np.nan)
    for j, (name, bins_of_client) in enumerate(bins.items()):
        count, confidence, share = (
            np.nan_to_num(np.asarray(value.cpu())) for value in bins_of_client
        )
        tested = count.sum()
        error = float(calibration_error(bins_of_client)[0])
        names.append(f"{style.short(name, 18)} ({tested:.0f} rows, ECE {error:.2f})")
        if tested:
            sure[j], right[j] = (count @ values / tested for values in (confidence, share))
            test = binomtest(round(right[j] * tested), int(tested))
            low[j], high[j] = test.proportion_ci(method="wilson")
    off = (sure < low) | (sure > high)
    rows, untested = many.rows(sure - right), int(np.isnan(right).sum())
    figure, axes = style.one_panel(6.4, many.height(len(bins)), ax, grid=None)
    sure, right, low, high = (v[rows.order] for v in (sure, right, low, high))
    bars = np.maximum((right - low, high - right), 0.0)  # where all are right, but for rounding
    for places, size in rows.parts():
        look: dict[str, Any] = {"fmt": "o", "color": COLORS[0], "ms": 5 * size}
        look |= {
            "xerr": bars[:, places],
            "lw": 1.6 * size,
            "ecolor": (COLORS[0], size**2),
            "label": "accuracy, 95% interval",
        }
        axes.errorbar(right[places], rows.at[places], **look)
        mark: dict[str, Any] = {"color": COLORS[1], "ms": 5 * size, "label": "mean confidence"}
        axes.plot(sure[places], rows.at[places], "D", **mark)
    rows.label(axes, names, "excess confidence")
    axes.set(xlabel="accuracy and confidence (fraction of rows)")
    axes.set_xlim(right=1.01)
    title = "Confidence and accuracy of each client: "
    title += f"confidence is outside the interval for {off.sum()} of {len(bins)}"
    note = f"{number_of(untested, 'client')} without test rows" if untested else ""
    return with_legend(figure, [axes], note=note, ax=ax, title=title)


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
    many.refuse_lengths(fits=fits)
    for name, (mean, low, high) in fits.items():
        many.refuse_lengths(sizes=sizes, mean=mean, low=low, high=high)
        many.refuse_swapped(name, low, high)
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


def entropies(entropy: Mapping[str, Sequence[Any]], classes: int, ax: Axes | None = None) -> Figure:
    """Plot the distribution of the clients' predictive entropy by data set.

    Distributions are cumulative: most entropies of confident models are near 0, where a density has
    a peak that hides the rest.

    Args:
        entropy: data set -> of every client, the entropy of its predictions [N], in nats. Every
            client is a thin line, all together a thick one.
        classes: K; entropy is between 0 and log K.
        ax: where to draw; None makes a figure.
    """
    from matplotlib.patheffects import Normal, Stroke

    figure, axes = style.one_panel(5.8, 3.8, ax)
    top = float(np.log(classes))
    edge = [Stroke(linewidth=4, foreground="white"), Normal()]
    every = {n: [np.asarray(v, dtype=float).ravel() for v in of] for n, of in entropy.items()}
    many.refuse_lengths(entropy=every)
    for name, of in every.items():
        many.refuse_lengths(**{name: of})
        many.refuse_outside(name, np.concatenate(of), -ROUNDING, top + ROUNDING)
    for name, look in styles(every).items():
        clients = [value[np.isfinite(value)] for value in every[name]]
        thin: dict[str, Any] = {"color": look["color"], "lw": 0.7, "alpha": 0.4}
        for value in many.some([value for value in clients if len(value)], MAX_CLIENT_LINES):
            axes.ecdf(value, **thin)
        thick = {"color": look["color"], "linewidth": 2.4, "label": name, "path_effects": edge}
        axes.ecdf(np.concatenate(clients), zorder=3, **thick)
    axes.set(xlim=(-0.02 * top, 1.02 * top), ylim=(-0.02, 1.02))
    axes.set_ylabel("predictions (cumulative fraction)")
    axes.set_xlabel(f"entropy of the prediction (nats; at most log {classes} = {top:.2f})")
    most = max(map(len, every.values()))
    lines = (
        "one client each" if most <= MAX_CLIENT_LINES else f"{MAX_CLIENT_LINES} of {most:,} clients"
    )
    gaps = many.missing(np.concatenate([value for of in every.values() for value in of]))
    note = many.notes(f"thin: {lines}; thick: all of them", gaps)
    title = "Uncertainty of predictions: curves further right are less certain"
    return with_legend(figure, [axes], note=note, ax=ax, title=title)


def _inside(values: Any, levels: Any) -> Any:
    """Return the fraction of central intervals of each level that contain the true value."""
    distance = 2 * np.abs(values - 0.5)
    return (distance <= levels[:, None]).mean(1) if len(values) else np.full(len(levels), np.nan)


def _gaps(every: Iterable[Any]) -> str:
    """Return text that states how many of all values are missing."""
    return many.missing(np.concatenate([np.asarray(v, dtype=float).ravel() for v in every]))


def _finite(values: Any) -> Any:
    """Return the known places; ValueError if one is not between 0 and 1."""
    array = np.asarray(values, dtype=float).ravel()
    many.refuse_outside("places", array, 0.0, 1.0)
    return array[np.isfinite(array)]
