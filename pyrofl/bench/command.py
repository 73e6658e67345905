"""The command `pyrofl bench`, and its figures."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyrofl.bench import cases, measuring
from pyrofl.bench.image_cases import IMAGES
from pyrofl.bench.measuring import Measured, Peak
from pyrofl.bench.personal_cases import PERSONAL
from pyrofl.cli.ends import ending, show
from pyrofl.cli.setup import threads
from pyrofl.data import Dataset, datasets
from pyrofl.figures import save
from pyrofl.figures.style import panels
from pyrofl.files import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = {**cases.CASES, **IMAGES, **PERSONAL}
CURVES = ("clients", "rows", "memory")
NAMES = (*CASES, *CURVES)


def bench(args: Namespace) -> None:
    """Time the cases that are asked for, print a table, and write bench.csv and its figures.

    Raises:
        ValueError: if a case is unknown, or the folder cannot be used.
    """
    unknown = sorted(set(args.case or ()) - set(NAMES))
    if unknown:
        raise ValueError(f"case is {unknown[0]!r}; expected one of {', '.join(NAMES)}")
    asked = args.case or [n for n in NAMES if not args.quick or n != "memory"]
    loaded = datasets.load(args.data, data_dir=args.data_dir) if args.data else None
    out = run_folder.prepare(args.out, args.overwrite)
    with ending("bench ended before all was measured: {}".format):
        with threads(args.threads):
            rows = list(_measured(args, asked, loaded))
            peaks = _peaks(args.quick) if "memory" in asked else []
        run_folder.write_csv(out / "bench.csv", Measured._fields, rows)
        save(ratios(rows), out / "ratios.png")
        if growing := [row for row in rows if row.case.startswith("clients=")]:
            save(clients_per_second(growing), out / "clients.png")
        if peaks:
            run_folder.write_csv(out / "memory.csv", Peak._fields, peaks)
            save(memory(peaks), out / "memory.png")
    columns = ("case", "ours_s", "other_s", "low", "high", "ratio")
    shown = [run_folder.table(columns, [[getattr(row, n) for n in columns] for row in rows])]
    shown += [run_folder.table(Peak._fields, peaks)] if peaks else []
    show("\n".join(shown), f"{out} holds all results")


def _measured(args: Namespace, asked: list[str], loaded: Dataset | None) -> Iterator[Measured]:
    turns, most = (2, 3) if args.quick else (args.turns, None)
    for name in asked:
        sys.stderr.write(f"{name}\n")
        if name == "clients":
            yield from measuring.clients(turns, measuring.CLIENTS[:most])
        elif name == "rows":
            yield from measuring.rows(turns, measuring.ROWS[:most])
        elif name in CASES:
            yield measuring.alternate(name, *CASES[name].sides(loaded), turns)


def _peaks(quick: bool) -> list[Peak]:
    if quick:
        return measuring.memory(100, measuring.CHUNKS[:2])
    return [*measuring.memory(1000), *measuring.memory(10_000, (0,))]


def ratios(rows: Sequence[Measured]) -> Figure:
    """Draw how many times faster we are in every case, its range, and the ratio we are after."""
    shown = [row for row in rows if row.case in CASES]
    figure, (axes,) = panels(1, 1, 7, 1.2 + 0.4 * max(len(shown), 1), grid=None)
    for place, row in enumerate(shown):
        axes.plot([row.low, row.high], [place, place], color="C0")
        axes.plot(row.ratio, place, "o", color="C0")
        if target := CASES[row.case].target:
            axes.plot(target, place, "|", color="C3", markersize=16, markeredgewidth=2)
    axes.axvline(1, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [row.case for row in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("times faster than the other side (median and range; red: aimed at)")
    return figure


def clients_per_second(rows: Sequence[Measured]) -> Figure:
    """Draw participants that are trained in a second against the number of clients."""
    figure, (axes,) = panels(1, 1, 5, 3.5, grid=None)
    count = [int(row.case.partition("=")[2]) for row in rows]
    speed = [max(1, round(0.1 * n)) / row.ours_s for n, row in zip(count, rows, strict=True)]
    axes.plot(count, speed, "o-")
    axes.set(xscale="log", xlabel="clients, a tenth of whom takes part")
    axes.set(ylim=(0, None), ylabel="clients trained per second")
    return figure


def memory(peaks: Sequence[Peak]) -> Figure:
    """Draw the peak of memory against clients side by side."""
    figure, (axes,) = panels(1, 1, 5, 3.5, grid=None)
    for clients in sorted({peak.clients for peak in peaks}):
        mine = [peak for peak in peaks if peak.clients == clients]
        label = f"{clients:,} clients, their state {mine[0].state_mib:,.0f} MiB"
        if known := [peak for peak in mine if peak.chunk]:
            axes.plot([p.chunk for p in known], [p.mib for p in known], "o-", label=label)
        for peak in mine:
            if not peak.chunk:
                axes.axhline(peak.mib, linestyle="--", label=f"{label}, automatic", color="C1")
    axes.set(xscale="log", xlabel="clients side by side")
    axes.set(ylim=(0, None), ylabel="peak memory (MiB)")
    axes.legend()
    return figure
