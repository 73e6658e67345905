"""Figures of standardized ratios: funnel plot and caterpillar plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMITS = {0.95: "--", 0.998: ":"}  # probability between the limits of a funnel plot -> line style


def funnel(table: Any, ax: Axes | None = None) -> Figure:
    """Plot observed over expected events by expected events, with limits of chance (funnel plot).

    The limits are exact quantiles of Poisson counts with the expected events as mean
    (Spiegelhalter, "Funnel Plots for Comparing Institutional Performance", Statistics in Medicine
    2005), interpolated; of events that are frequent in each row, they are too wide. Clients beyond
    the outer limits have names.

    Args:
        table: what `standardize` returns.
        ax: where to draw; None makes a figure.
    """
    from pyrofl.figures import style

    expected, raw = table["expected"].to_numpy(), table["raw"].to_numpy()
    figure, axes = style.one_panel(5.4, 3.8, ax)
    at = np.geomspace(max(expected.min() / 1.5, 0.5), expected.max() * 1.2, 200)
    for prob, line in LIMITS.items():
        ends = [_limit(p, at) for p in ((1 - prob) / 2, (1 + prob) / 2)]
        for end, label in zip(ends, (f"{100 * prob:g}% limits", None), strict=True):
            axes.plot(at, end, line, color="black", linewidth=0.8, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.plot(expected, raw, "o", markersize=4)
    tails = [(1 - max(LIMITS)) / 2, (1 + max(LIMITS)) / 2]
    low, high = (_limit(p, expected) for p in tails)
    for name, x, y, is_out in zip(
        table.index, expected, raw, (raw < low) | (raw > high), strict=True
    ):
        if is_out:
            axes.annotate(str(name), (x, y), xytext=(4, 2), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("expected events")
    axes.set_ylabel("observed / expected events")
    axes.legend()
    return figure


def _limit(probability: float, expected: Any) -> Any:
    """Return an interpolated quantile of Poisson counts, divided by the expected events [N]."""
    from scipy.stats import poisson

    count = poisson.ppf(probability, expected)
    above = poisson.cdf(count, expected) - probability
    part = above / poisson.pmf(count, expected)
    return np.maximum(count - part, 0.0) / expected


def caterpillar(table: Any, ax: Axes | None = None) -> Figure:
    """Plot the standardized ratios of all clients with their intervals, sorted (caterpillar plot).

    Args:
        table: what `standardize` returns.
        ax: where to draw; None makes a figure.
    """
    from pyrofl import figures

    rows = table.sort_values("median")
    low, high = (name for name in rows.columns if str(name).endswith("%"))
    summary = tuple(rows[["median", low, high]].to_numpy().T)
    labels = list(map(str, rows.index))
    figure = figures.forest({f"{low} to {high}": summary}, labels, "standardized ratio", ax=ax)
    for text in figure.texts:
        if text.get_gid() == "title":
            text.set_text("Posterior medians and intervals")
    axes = figure.axes[0] if ax is None else ax
    axes.axvline(1.0, color="black", linewidth=0.8)
    return figure
