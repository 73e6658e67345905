"""Reproduce pFedVEM's figures 2, 10 and 11: clients by their number of rows, and their statistics.

Runs are those of studies.py at size small. Figure 2 compares the accuracy of personal models with
the client's rows on CIFAR-100. Figures 10 and 11 compare data sets by the confidences tau_j, as
multiples of their mean over the clients, and the deviations |mu_j - w|^2 / d.

Run: python examples/papers/pfedvem/clients.py --data-dir DIR [--quick] [--out FILE]
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[level]) for level in (1, 2)]

import files
import plots
import simulated_files
from pfedvem.studies import STUDIES

from pyrofl import figures

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with small simulated data.")
parser.add_argument("--data-dir", type=Path, help="Folder of NAME.npz files.")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--out", type=Path, default=Path("results/clients.csv"))
args = parser.parse_args()
size = "smoke" if args.quick else "small"
if args.quick:
    folder = tempfile.TemporaryDirectory()
    args.data_dir, args.seeds = Path(folder.name), [0]
    simulated_files.write_all(args.data_dir)

SETS = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
BY_SIZE = ("Local", "FedRep", "pFedMe", "pFedVEM")


def measure(figure: str, data: str, row: str, seed: int) -> Iterator[list[float | None]]:
    """Return the rows, accuracy, relative confidence and deviation of each client."""
    case = "50 clients" if figure == "2" else "100 clients"
    run = STUDIES[f"table1_{data}"].trial(size, case, row, "", seed, args.data_dir).fit()
    scores, known = run.evaluate(model="personal"), run.statistics()
    for client, accuracy in zip(scores.ids.tolist(), scores.values["accuracy"], strict=True):
        about: list[float | None] = [None, None]
        if row == "pFedVEM":
            tau, deviation = (known[name].double() for name in ("tau", "deviation"))
            about = [float(tau[client] / tau.mean()), float(deviation[client])]
        yield [client, int(run.data.sizes[client]), float(accuracy), *about]


runs: list[tuple[Any, ...]] = [
    ("2", "cifar100", row, seed) for seed in args.seeds for row in BY_SIZE
]
runs += [("10", data, "pFedVEM", seed) for seed in args.seeds for data in SETS]
head = ("figure", "data", "row", "seed", "client", "rows", "accuracy", "tau", "deviation")
of = files.by(files.fill(args.out, head, runs, measure, size=size), "figure")
points = {
    row: (files.numbers(some, "rows"), files.numbers(some, "accuracy", 100))
    for row, some in files.by(of["2"], "row").items()
}
figures.save(plots.by_size(points), args.out.with_name("figure2.png"))
shown = {
    title: {SETS[d]: files.numbers(some, column) for d, some in files.by(of["10"], "data").items()}
    for title, column in (("confidence / mean of the clients", "tau"), ("deviation", "deviation"))
}
figures.save(plots.densities(shown), args.out.with_name("figure10.png"))
print(f"Results saved to {args.out.parent}: {args.out.name}, figure2.png, figure10.png")
