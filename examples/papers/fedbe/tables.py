"""Lay out the CSV files of this folder as the tables of its README.

Run: python examples/papers/fedbe/tables.py
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent


def read(name: str) -> list[dict[str, str]]:
    """Return the lines of a file, none if it is not there."""
    path = HERE / name
    return list(csv.DictReader(path.open())) if path.is_file() else []


def spread(values: list[float]) -> str:
    """Write a mean with its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{error}"


def students() -> None:
    """Print what the student gains on the average it starts from."""
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for line in read("students.csv"):
        found[line["partition"], line["setting"]].append(line)
    print("\nstudents.csv\n")
    print("| partition | setting | average | student | gain | below | ensemble | agreement |")
    print("|---|---|---|---|---|---|---|---|")
    for (partition, setting), lines in found.items():
        columns = ("average", "student", "ensemble", "agreement")
        of = {n: [float(line[n]) for line in lines] for n in columns}
        gain = [b - a for a, b in zip(of["average"], of["student"], strict=True)]
        below = f"{sum(g < 0 for g in gain)} of {len(gain)}"
        means = [f"{mean(of[n]):.1f}" for n in columns]
        cells = [partition, setting, *means[:2], spread(gain), below, *means[2:]]
        print(f"| {' | '.join(cells)} |")


def swiss_roll() -> None:
    """Print how often the ensemble is above FedAvg."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for line in read("swiss_roll.csv"):
        found[line["lr"]].append([float(line[n]) for n in ("fedavg", "ensemble", "best_of_100")])
    print("\nswiss_roll.csv\n")
    print("| learning rate | FedAvg | ensemble | gain | its sd | wins | best of 100 mixtures |")
    print("|---|---|---|---|---|---|---|")
    for lr, rows in found.items():
        fedavg, ensemble, best = (list(column) for column in zip(*rows, strict=True))
        gain = [b - a for a, b in zip(fedavg, ensemble, strict=True)]
        wins = f"{sum(g > 0 for g in gain)} of {len(gain)}"
        cells = [lr, *map(spread, (fedavg, ensemble, gain)), f"{stdev(gain):.1f}", wins]
        print(f"| {' | '.join([*cells, spread(best)])} |")


if __name__ == "__main__":
    students()
    swiss_roll()
