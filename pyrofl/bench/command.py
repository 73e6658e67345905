"""The command `pyrofl bench`."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator

import torch

from pyrofl.bench import drawing, scaling
from pyrofl.bench.cases import CASES
from pyrofl.bench.timing import Measured, alternate
from pyrofl.data import datasets
from pyrofl.figures import save
from pyrofl.files import run_folder

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
    out = run_folder.prepare(args.out, args.overwrite)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        rows = list(_measured(args, asked))
        peaks = _peaks(args.quick) if "memory" in asked else []
    finally:
        torch.set_num_threads(before)
    print(run_folder.table(("case", "ours_s", "other_s", "low", "high", "ratio"), map(_line, rows)))
    run_folder.write_csv(out / "bench.csv", Measured._fields, rows)
    save(drawing.ratios(rows, {n: case.target for n, case in CASES.items()}), out / "ratios.png")
    growing = [row for row in rows if row.case.startswith("clients=")]
    if growing:
        save(drawing.clients_per_second(growing), out / "clients.png")
    if peaks:
        print(run_folder.table(scaling.Peak._fields, peaks))
        run_folder.write_csv(out / "memory.csv", scaling.Peak._fields, peaks)
        save(drawing.memory(peaks), out / "memory.png")


def _measured(args: Namespace, asked: list[str]) -> Iterator[Measured]:
    loaded = datasets.load(args.data, data_dir=args.data_dir) if args.data else None
    turns = 2 if args.quick else args.turns
    for name in asked:
        sys.stderr.write(f"{name}\n")
        if name == "clients":
            yield from scaling.clients(
                turns, scaling.CLIENTS[:3] if args.quick else scaling.CLIENTS
            )
        elif name == "rows":
            yield from scaling.rows(turns, scaling.ROWS[:3] if args.quick else scaling.ROWS)
        elif name in CASES:
            yield alternate(name, *CASES[name].sides(loaded), turns)


def _peaks(quick: bool) -> list[scaling.Peak]:
    if quick:
        return scaling.memory(100, scaling.CHUNKS[:2])
    return [*scaling.memory(1000), *scaling.memory(10_000, (0,))]


def _line(row: Measured) -> tuple[object, ...]:
    return row.case, row.ours_s, row.other_s, row.low, row.high, row.ratio
