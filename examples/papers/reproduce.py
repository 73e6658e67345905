"""Run a table or figure of a paper at one of three sizes, and write its CSV file and figure.

Size smoke takes seconds, with small simulated data sets. Size small takes minutes on
two cores: rows, networks and rounds are fewer than in the paper, and settings are those that
examples/tuned.py chose, or the best of a grid on validation rows. Size paper has the paper's data,
network, rounds and seeds, for a machine with a GPU, and its settings where it states them; others
come from the same tuning. An interrupted command resumes where its CSV file ends.

With --estimate it times one round of each row, and prints the expected hours of all rounds and
seeds; see cost.py.

Run: python examples/papers/reproduce.py PAPER STUDY [--size small] [--data-dir DIR] [--out DIR]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import cost
import simulated_files
from files import Lines, fill, in_words, read
from harness import PAPERS, SIZES, Study, chosen_lines, load

from pyrofl import figures

SEEDS = {"smoke": range(1), "small": range(3), "paper": range(5)}


def studies(paper: str) -> dict[str, Study]:
    """Return the studies of a paper by name."""
    found: dict[str, Study] = import_module(f"{paper}.studies").STUDIES
    return found


def missing(study: Study, size: str, case: str, name: str, data_dir: Path | None) -> str:
    """Return why data of a run cannot be loaded, or ""."""
    at = study.settings(size, case, name)
    try:
        load(at.data, at.pixels, at.per_class, at.tested, data_dir)
        if isinstance(at.server_data, str):
            load(at.server_data, None, at.server_rows, 1, data_dir)
    except ValueError as error:
        return str(error)
    return ""


def selected(
    study: Study, size: str, data_dir: Path | None, only: argparse.Namespace
) -> list[tuple[str, str, str]]:
    """Return the selected runs whose data can be loaded; print why others are left out."""
    cells, reasons = [], dict[tuple[object, ...], str]()
    for case, name, grid in study.runs(size):
        if (only.cases and case not in only.cases) or (only.rows and name not in only.rows):
            continue
        at = study.settings(size, case, name)
        key = (at.data, at.pixels, at.per_class, at.tested, at.server_data, at.server_rows)
        if key not in reasons:  # a download that fails is tried once
            reasons[key] = missing(study, size, case, name, data_dir)
            if reasons[key]:
                print(f"{case or study.title}: not run: {reasons[key]}", flush=True)
        if not reasons[key]:
            cells.append((case, name, grid))
    return cells


def execute(
    study: Study,
    size: str,
    seeds: list[int],
    data_dir: Path | None,
    path: Path,
    only: argparse.Namespace,
) -> None:
    """Execute the runs of a study that its file lacks, seed by seed."""
    head = ("case", "row", "grid", "seed", *study.metrics)

    def measure(case: str, name: str, grid: str, seed: int) -> Iterator[list[float | None]]:
        trial = study.trial(size, case, name, grid, seed, data_dir, only.device)
        scores = study.measure(trial)
        yield [scores.get(metric) for metric in study.metrics]

    cells = selected(study, size, data_dir, only)
    for seed in seeds:
        for case, name, grid in cells:
            about = study.recorded(size, case, name, grid)
            fill(path, head, [(case, name, grid, seed)], measure, **about)


def todays_lines(study: Study, size: str, lines: Lines) -> Lines:
    """Return the lines with the settings of today; print how many others the file holds."""
    runs, today = set(study.runs(size)), []
    for line in lines:
        cell = (line["case"], line["row"], line["grid"])
        if cell in runs and line["settings"] == in_words(study.recorded(size, *cell)):
            today.append(line)
    if others := len(lines) - len(today):
        print(f"the figure is without {others} lines with other settings: remove them from the CSV")
    return today


def predict(
    study: Study, size: str, data_dir: Path | None, path: Path, only: argparse.Namespace
) -> None:
    """Time a round of each row and column, and print the expected hours of all runs."""

    def measure(case: str, name: str) -> Iterator[list[float]]:
        trial = study.trial(size, case, name, grid, data_dir=data_dir, device=only.device)
        timed = cost.estimate(trial)
        runs = len(SEEDS[size]) * max(1, len(study.grid))
        yield [*timed, timed.hours(trial.settings.rounds, runs)]

    lines = []
    for case, name, grid in selected(study, size, data_dir, only):
        if grid in study.grid[:1] or not study.grid:
            about = {**study.recorded(size, case, name, grid), "seeds": len(SEEDS[size])}
            known = fill(path, cost.HEAD, [(case, name)], measure, **about)
            lines += [line for line in known if (line["case"], line["row"]) == (case, name)]
    for line in lines:
        where = ", ".join(filter(None, (line["case"], line["row"])))
        part = f"{float(line['part']):.0%} of a round timed"
        print(f"{where}: {float(line['hours']):.3g} hours ({part})")
    print(f"all {len(lines)} rows: {sum(float(line['hours']) for line in lines):.3g} hours")


def main() -> int:
    """Parse the command line and run a study."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("paper", choices=list(PAPERS))
    parser.add_argument("study", help="Name of a table or figure, or list.")
    parser.add_argument("--size", choices=SIZES, default="smoke")
    parser.add_argument("--data-dir", type=Path, help="Folder of NAME.npz files and downloads.")
    parser.add_argument("--seeds", type=int, nargs="+", help="Default: 1, 3 or 5 by size.")
    parser.add_argument("--cases", nargs="+", help="Columns of the table (default: all).")
    parser.add_argument("--rows", nargs="+", help="Rows of the table (default: all).")
    parser.add_argument("--device", default="cpu", help="PyTorch device, such as cuda.")
    parser.add_argument("--out", type=Path, help="Folder (default: results/PAPER/SIZE).")
    parser.add_argument(
        "--estimate", action="store_true", help="Only time a round of each row; print hours."
    )
    args = parser.parse_args()
    of = studies(args.paper)
    if args.study == "list":
        print("\n".join(f"{name}: {study.title}" for name, study in of.items()))
        return 0
    if args.study not in of:
        parser.error(f"study is {args.study}; expected one of {', '.join(of)}, or list")
    kind = "cost" if args.estimate else args.size
    study, out = of[args.study], args.out or Path("results") / args.paper / kind
    path = out / f"{args.study}.csv"
    with tempfile.TemporaryDirectory() as folder:
        if args.size == "smoke" and args.data_dir is None:
            args.data_dir = Path(folder)
            simulated_files.write_all(args.data_dir)
        if args.estimate:
            predict(study, args.size, args.data_dir, path, args)
            return 0
        seeds = args.seeds or list(SEEDS[args.size])
        execute(study, args.size, seeds, args.data_dir, path, args)
        lines = chosen_lines(study, todays_lines(study, args.size, read(path)))
        if not lines:
            reasons = sorted({case.untried for case in study.cases.values() if case.untried})
            print(f"no result of {args.study} at size {args.size}: {'; '.join(reasons)}")
            return 2
        if study.figure:
            figures.save(study.figure(lines, args.data_dir), path.with_suffix(".png"))
    print(
        f"Results saved to {out}: {args.study}.csv{f', {args.study}.png' if study.figure else ''}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
