"""Lay out the CSV files of this folder as the tables of its README.

Run: python examples/papers/metavd/tables.py
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
    """Write a mean, with its standard error if there are several."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2g}" if len(values) > 1 else ""
    return f"{mean(values):.3g}{error}"


def regimes(name: str) -> None:
    """Print scores by method and round: mean of the weights / ten draws."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for line in read(name):
        key = (line["method"], line["round"], line["population"], line["metric"], line["by"])
        scale = 1 if line["metric"] == "nll" else 100
        found[key].append(scale * float(line["value"]))
    print(f"\n{name}\n")
    print(
        "| method | round | seeds | accuracy | NLL | ECE | held-out accuracy | NLL | ECE | > .9 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for method, number in dict.fromkeys(key[:2] for key in found):
        cells = []
        for who in ("training", "held_out"):
            for metric in ("accuracy", "nll", "ece"):
                both = [found[method, number, who, metric, by] for by in ("mean", "draws")]
                shown = both[:1] if method == "X" else both
                cells.append(" / ".join(map(spread, shown)))
        high = found.get((method, number, "training", "rates_above_0.9", "server"))
        seeds = str(len(found[method, number, "training", "nll", "mean"]))
        cells += [spread(high) if high else ""]
        print(f"| {' | '.join([method, number, seeds, *cells])} |")


def pull() -> None:
    """Print the share of rates above 0.9 by round, means over seeds."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in read("pull.csv"):
        found[int(line["weights"]), int(line["round"])].append(100 * float(line["rates_above_0.9"]))
    rounds = [r for r in (3, 5, 6, 8, 10, 12, 15, 20) if any(r == key[1] for key in found)]
    print("\npull.csv\n")
    print(f"| weights | {' | '.join(f'round {r}' for r in rounds)} |")
    print(f"|---|{'---|' * len(rounds)}")
    for d in sorted({key[0] for key in found}):
        print(f"| {d:,} | {' | '.join(f'{mean(found[d, r]):.0f}' for r in rounds)} |")


if __name__ == "__main__":
    regimes("overfit.csv")
    regimes("underfit.csv")
    pull()
