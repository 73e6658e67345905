"""Figures of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyrofl.bench.timing import Measured
from pyrofl.figures.style import canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyrofl.bench.scaling import Peak


def ratios(rows: Sequence[Measured], targets: Mapping[str, float | None]) -> Figure:
    """Draw how many times faster we are in every case, its range, and the ratio we are after."""
    shown = [row for row in rows if row.case in targets]
    figure = canvas(7, 1.2 + 0.4 * max(len(shown), 1))
    axes = figure.subplots()
    for place, row in enumerate(shown):
        axes.plot([row.low, row.high], [place, place], color="C0")
        axes.plot(row.ratio, place, "o", color="C0")
        target = targets[row.case]
        if target:
            axes.plot(target, place, "|", color="C3", markersize=16, markeredgewidth=2)
    axes.axvline(1, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [row.case for row in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times faster than the other side (median and range; red: aimed at)")
    return figure


def clients_per_second(rows: Sequence[Measured]) -> Figure:
    """Draw participants that are trained in a second against the number of clients."""
    figure = canvas(5, 3.5)
    axes = figure.subplots()
    count = [int(row.case.partition("=")[2]) for row in rows]
    speed = [max(1, round(0.1 * n)) / row.ours_s for n, row in zip(count, rows, strict=True)]
    axes.plot(count, speed, "o-")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients, a tenth of whom takes part")
    axes.set_ylabel("clients trained per second")
    return figure


def memory(peaks: Sequence[Peak]) -> Figure:
    """Draw the peak of memory against clients side by side."""
    figure = canvas(5, 3.5)
    axes = figure.subplots()
    for clients in sorted({peak.clients for peak in peaks}):
        mine = [peak for peak in peaks if peak.clients == clients]
        label = f"{clients:,} clients, their state {mine[0].state_mib:,.0f} MiB"
        known = [peak for peak in mine if peak.chunk]
        if known:
            axes.plot([p.chunk for p in known], [p.mib for p in known], "o-", label=label)
        for peak in mine:
            if not peak.chunk:
                axes.axhline(peak.mib, linestyle="--", label=f"{label}, automatic", color="C1")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients side by side")
    axes.set_ylabel("peak memory (MiB)")
    axes.legend()
    return figure
