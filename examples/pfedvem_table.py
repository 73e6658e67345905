"""Reproduce pFedVEM's table 1: personal and global models of 50, 100 and 200 clients.

Each client has five of the ten labels and slices of random size. Personal models are tested on all
test rows of the labels of their client, global models on all test rows. Small clients are the 10%
with the fewest rows. --full uses the scale of the paper. Some settings of `METHODS` are not those
that examples/tuned.py chooses on validation rows of the same images and another partition; --chosen
takes these, and writes chosen.csv instead of table.csv and the figure.

Run: python examples/pfedvem_table.py [--data npz:fashion_mnist.npz] [--quick] [--full]
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from papers import files
from papers.settings import chosen

import pyrofl
from pyrofl import datasets, federations, figures, nets

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "Local": ("local", {"lr": 0.03}),
    "FedAvg": ("fedavg", {"lr": 0.01}),
    "FedProx": ("fedprox", {"lr": 0.01, "mu": 1.0}),
    "SCAFFOLD": ("scaffold", {"lr": 0.03}),
    "FedPer": ("fedper", {"lr": 0.03}),
    "FedRep": ("fedrep", {"lr": 0.03}),
    "IFCA": ("ifca", {"lr": 0.1, "momentum": 0.0, "clusters": 2}),
    "Per-FedAvg": ("perfedavg", {"lr": 0.1, "inner_lr": 0.05}),
    "pFedVEM": ("pfedvem", {}),
    "pFedVEM, uncertainty only": ("pfedvem", {"confidence": "uncertainty"}),
    "pFedVEM, deviation only": ("pfedvem", {"confidence": "deviation"}),
    "pFedMe": ("pfedme", {"lr": 0.05, "strength": 5.0, "lr_center": 0.2, "epochs": 2}),
    "pFedBayes": ("pfedbayes", {"lr": 0.003, "kl": 0.01, "epochs": 1, "num_particles": 1}),
}
HEAD = ("clients", "rows", "rounds", "method", "seed", "personal", "smallest", "global")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--full", action="store_true", help="Use the scale of the paper: all rows.")
parser.add_argument("--data", default="digits", help="Data set with ten classes.")
parser.add_argument("--clients", type=int, nargs="+", default=[100, 50, 200])
parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument(
    "--per-class", type=int, default=200, help="Training rows per class, over all clients."
)
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument(
    "--participation",
    default="0.3",
    help="Probability of participation; the default gives 9 rounds per client, the paper 10.",
)
parser.add_argument(
    "--chosen", action="store_true", help="Use the settings of papers/tuned/budget.csv."
)
parser.add_argument("--out", type=Path, default=Path("results/pfedvem_table"))
args = parser.parse_args()
print("A full run takes about an hour on one core; --quick takes seconds.", flush=True)
if args.full:
    args.seeds, args.net, args.rounds, args.participation = [*range(5)], "mlp:100", 100, "0.1"
if args.quick:
    args.clients, args.seeds, args.rounds, args.per_class = [10], [0], 2, 20
    args.methods = ["Local", "FedPer", "pFedVEM"]

dataset = datasets.load(args.data)
if not args.full:
    dataset = datasets.per_class(dataset, args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
total = int((~dataset.is_test).sum())


def measure(clients: int, rows: int, rounds: int, name: str, seed: int) -> list[list[Any]]:
    """Return the accuracies of one run; None if the method lacks the model."""
    module, settings = METHODS[name]
    if args.chosen:
        settings = settings | chosen()[module]
    data = federations.split(dataset, "slices:5", clients, seed=seed, test="same_classes")
    method = import_module(f"pyrofl.models.{module}").build(net, **settings)
    some = pyrofl.participation.bernoulli(float(args.participation))
    run = pyrofl.fit(method, data, rounds, seed=seed, participation=some, progress=False)
    found: list[Any] = [None, None, None]
    if "personal" in method.views:
        adaptation = "fine_tune" if name == "Per-FedAvg" else "none"
        scores = run.evaluate(model="personal", adaptation=adaptation)
        found[:2] = scores.mean("accuracy"), scores.smallest(0.1, data.sizes).mean("accuracy")
    if "global" in method.views:
        found[2] = run.evaluate(model="global", population="pooled").mean("accuracy")
    return [found]


runs = [
    (clients, total, args.rounds, name, seed)
    for clients in args.clients
    for seed in args.seeds
    for name in args.methods
    if clients == args.clients[0] or "only" not in name  # ablations once
]
about = {"data": dataset.name, "net": args.net, "participation": args.participation}
about |= {"settings": "chosen"} if args.chosen else {}
table = args.out / ("chosen.csv" if args.chosen else "table.csv")
lines = files.fill(table, HEAD, runs, measure, **about)
for clients, some in files.by(lines, "clients").items():
    print(f"{clients} clients, accuracy in percent")
    print(files.means(files.by(some, "method"), dict.fromkeys(HEAD[-3:], 100)))
if not args.chosen:
    shown = [
        {"method": line["method"], "seed": line["seed"], "model": view, "adaptation": "none"}
        | {"metric": "accuracy", "value": float(line[view])}
        for line in lines
        for view in ("personal", "global")
        if line["clients"] == str(args.clients[0]) and line[view]
    ]
    figures.save(figures.comparison(shown), args.out / "table.png")
print(f"Results saved to {table.parent}: {table.name}{'' if args.chosen else ', table.png'}")
