"""The command `pyrofl bench`, and its figures."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pyrofl.bench import measuring
from pyrofl.bench.measuring import Measured, Peak
from pyrofl.bench.worker import CASES, NAMES, QUICK, SHORT, Task, measured
from pyrofl.cli.ends import ending, show, tell, what
from pyrofl.data import datasets
from pyrofl.figures import save
from pyrofl.figures.style import panels
from pyrofl.files import hashed, run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, ABOUT, PAGE = "bench.csv", "bench.json", "bench.md"
OWN = r"(bench|memory)\.csv|bench\.(json|md)|(ratios|clients|memory)\.png"
SHOWN = ("case", "threads", "ours_s", "other_s", "low", "high", "ratio", "cpu_ratio")


def bench(args: Namespace) -> None:
    """Time the cases that are asked for, print a table, and write bench.csv and its figures.

    Every case runs in a process of its own, and its rows are written when it is done, so that
    `--resume` goes on with those that are not there.

    Raises:
        ValueError: if a case is unknown, or the folder cannot be used or holds other settings.
    """
    unknown = sorted(set(args.case or ()) - set(NAMES))
    if unknown:
        raise ValueError(f"case is {unknown[0]!r}; expected one of {', '.join(NAMES)}")
    asked = args.case or (QUICK if args.quick else NAMES)
    if args.data:  # each case reads them again
        datasets.load(args.data, data_dir=args.data_dir)
    out = run_folder.prepare(args.out, args.overwrite, OWN if args.resume else "")
    turns = SHORT if args.quick else args.turns
    task = Task(turns, args.threads, args.data, args.data_dir, args.quick)
    kept = _kept(out, task) if args.resume else []
    with ending("bench ended before all was measured: {}; go on with --resume".format):
        run_folder.write_json(out / ABOUT, _about(task))
        rows, lacking = _measured(asked, task, kept, out)
        figures(rows, out)
        peaks = _peaks(args.quick, out) if "memory" in asked else []
        if lacking:
            raise ValueError("; ".join(lacking))
    shown = [run_folder.table(SHOWN, [[getattr(row, n) for n in SHOWN] for row in rows])]
    shown += [run_folder.table(Peak._fields, peaks)] if peaks else []
    show("\n".join(shown), f"{out} holds all results")


def _about(task: Task) -> dict[str, Any]:
    """Say what all rows of a table have in common."""
    allocator = {n: v for n, v in os.environ.items() if n.startswith("MALLOC_")}
    common = {"turns": task.turns, "data": task.data, "quick": task.quick}
    return {**common, "processor": _processor(), "allocator": allocator, **run_folder.versions()}


def _processor() -> str:
    """Name the processor, and how many there are of it."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(v.partition(":")[2].strip() for v in lines if v.startswith("model name"))
    return f"{os.cpu_count()} x {name}"


def _kept(out: Path, task: Task) -> list[Measured]:
    """Return the rows that are there; ValueError if they were measured in another way."""
    if not (table := out / TABLE).exists():
        return []
    try:
        about, rows = json.loads((out / ABOUT).read_text()), read(table)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{table} cannot be read: {error!r}; expected one of bench") from error
    hashed.same(table, about, _about(task))
    return rows


def read(table: Path) -> list[Measured]:
    """Read a bench.csv."""
    kinds = get_type_hints(Measured)
    found = run_folder.read_csv(table)
    return [Measured(**{n: kind(row[n]) for n, kind in kinds.items()}) for row in found]


def _measured(
    asked: Sequence[str], task: Task, kept: list[Measured], out: Path
) -> tuple[list[Measured], list[str]]:
    """Return the rows of all cases, which are written after each, and what is lacking and why."""
    rows, lacking = [*kept], []
    known = {(row.case.partition("=")[0], row.threads) for row in kept}
    for name in asked:
        if name == "memory" or (name, task.threads) in known:
            continue
        tell(f"{name}\n")
        try:
            rows += measured(name, task, tell)
        except ValueError as error:  # of one case: others may work
            lacking.append(what(error))
            tell(f"{what(error)}\n")
        run_folder.write_csv(out / TABLE, Measured._fields, rows)
        with run_folder.replacing(out / PAGE) as page:
            page.write_text(markdown(rows))
    return rows, lacking


def markdown(rows: Sequence[Measured]) -> str:
    """Lay out a table for a page, the worst ratio first, in seconds of the processor and of time.

    >>> row = Measured("a", 1, 2.0, 3.0, 1.5, 1.0, 2.0, 1.0, 2.0, 2.0, 9.0, 9.0)
    >>> print(markdown([row]).splitlines()[-1])
    | a | 1 | 2.0 | 1.0 s | 2.0 s | 1.5 (1.0 to 2.0) | 2.0 s | 3.0 s |
    """
    lines = [
        "| case | threads | times faster | ours | other | by the clock (range) | ours | other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row.cpu_ratio, row.case)):
        times = [
            f"{_short(v)} s" for v in (row.ours_cpu_s, row.other_cpu_s, row.ours_s, row.other_s)
        ]
        clock = f"{_short(row.ratio)} ({_short(row.low)} to {_short(row.high)})"
        cells = [row.case, row.threads, _short(row.cpu_ratio), *times[:2], clock, *times[2:]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _short(ratio: float) -> str:
    return f"{ratio:#.2g}".rstrip(".")


def _peaks(quick: bool, out: Path) -> list[Peak]:
    few, many = measuring.CHUNKS[:2], measuring.CHUNKS
    asked = [(100, few)] if quick else [(1000, many), (10_000, (0,))]
    found = [measuring.memory(clients, chunks, tell=tell) for clients, chunks in asked]
    peaks = [peak for some in found for peak in some]
    run_folder.write_csv(out / "memory.csv", Peak._fields, peaks)
    save(memory(peaks), out / "memory.png")
    return peaks


def figures(rows: Sequence[Measured], out: Path) -> None:
    """Draw what was measured."""
    if rows:
        save(ratios(rows), out / "ratios.png")
    if growing := [row for row in rows if row.case.startswith("clients=")]:
        save(clients_per_second(growing), out / "clients.png")


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
    axes.set_yticks(range(len(shown)), [f"{row.case} ({row.threads})" for row in shown])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(
        "times faster than the other side (threads in brackets; median, range, red: aimed at)"
    )
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
