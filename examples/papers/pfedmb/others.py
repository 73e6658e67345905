"""Reproduce pFedMB's table II: nine methods, each fine-tuned before its test.

The clients have two random classes or a Dirichlet(0.4) partition. All fifteen clients participate
in every round, or a fifth of fifty. For every method one of the same learning rates is chosen on
validation rows of the clients. The number of branches is that of the paper's table III. A line of
the CSV is one run: accuracy on validation rows, and on test rows before and after five epochs of
local training.

Run: python examples/papers/pfedmb/others.py [--quick] [--full] [--data NAME] [--columns NAME ...]
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import fedamp, fedavg, fedfomo, fedper, fedprox, ifca, local, pfedmb, pfedme
from pyrofl.tensors import generator

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from papers import files  # noqa: E402

COLUMNS = {
    "Dirichlet, 15": ("dirichlet:0.4,min=10", 15, 1.0, 7),
    "Dirichlet, 50": ("dirichlet:0.4,min=10", 50, 0.2, 6),
    "two classes, 15": ("labels:2", 15, 1.0, 6),
    "two classes, 50": ("labels:2", 50, 0.2, 10),
}
"""name -> partition, clients, fraction that participates, branches of pFedMB."""

BUILD: dict[str, Callable[..., pyrofl.Method]] = {
    "Local": local.build,
    "FedAvg": fedavg.build,
    "FedProx": fedprox.build,
    "FedPer": fedper.build,
    "pFedMe": pfedme.build,
    "IFCA": ifca.build,
    "FedFomo": fedfomo.build,
    "FedAMP": fedamp.build,
    "pFedMB": pfedmb.build,
}
HEAD = ("column", "method", "rate", "seed", "tuning", "before", "after")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument(
    "--full", action="store_true", help="Use the network of the paper and all rows."
)
parser.add_argument("--data", default="digits", help="Data set with ten classes.")
parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
parser.add_argument("--methods", nargs="+", default=list(BUILD), choices=list(BUILD))
parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.06, 0.2])
parser.add_argument(
    "--rows", type=int, default=100, help="Approximate number of training rows per client."
)
parser.add_argument("--net", default="mlp:50")
parser.add_argument(
    "--rounds", type=int, default=20, help="Rounds; twice as many with partial participation."
)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=HERE / "others.csv")
args = parser.parse_args()
print("A full run takes about half an hour on one core; --quick takes seconds.", flush=True)
if args.full:
    args.net, args.rounds = "cnn-pfedmb", 200
if args.quick:
    args.columns, args.methods = ["Dirichlet, 15"], ["FedAvg", "FedPer", "pFedMB"]
    args.rates, args.rounds, args.seeds = [0.1], 2, 1

whole = datasets.load(args.data)
net = nets.build(args.net, tuple(whole.x.shape[1:]), len(whole.classes))


def divided(rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return training rows of a client, and a fifth of its rows for validation."""
    order = rows[torch.randperm(len(rows), generator=generator(seed))]
    return order[len(rows) // 5 :], order[: len(rows) // 5]


def scores(column: str, name: str, rate: float, seed: int) -> list[list[float]]:
    """Return the accuracies of one run on validation and test rows."""
    partition, clients, share, branches = COLUMNS[column]
    rows = args.rows * clients // len(whole.classes)
    dataset = whole if args.full else datasets.per_class(whole, rows)
    data = federations.split(dataset, partition, clients, seed=seed)
    kept, aside = zip(*(divided(rows, seed) for rows in data.train), strict=True)
    data = replace(data, train=kept)
    tuning = replace(data, test=aside)
    own: dict[str, Any] = {} if name == "Local" else {"fine_tune": 5}
    if name == "pFedMB":
        own = {"branches": branches, "lr_alpha": 10 * rate}
    method = BUILD[name](net, epochs=5, batch=64, lr=rate, momentum=0.0, **own)
    tuned = "fine_tune" if method.adapt else "train"  # the local training once more
    some = pyrofl.participation.fraction(share)
    rounds = args.rounds if share == 1 else 2 * args.rounds
    run = pyrofl.fit(method, data, rounds, seed=seed, participation=some, progress=False)

    def accuracy(of: pyrofl.Federation, adaptation: str) -> float:
        return pyrofl.evaluate(method, of, run.state, adaptation=adaptation).mean("accuracy")

    return [[accuracy(tuning, tuned), accuracy(data, "none"), accuracy(data, tuned)]]


runs = [
    (column, name, rate, seed)
    for column in args.columns
    for name in args.methods
    for seed in range(args.seeds)
    for rate in args.rates
]
about = {"data": whole.name, "rows": args.rows, "net": args.net, "rounds": args.rounds}
lines = files.fill(args.out, HEAD, runs, scores, **about)
for column, some in files.by(lines, "column").items():
    print(f"{column} clients, accuracy in percent")
    print(files.means(files.best(some, "tuning", over="rate"), {"before": 100, "after": 100}))
