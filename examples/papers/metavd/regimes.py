"""Where does MetaVD gain: where clients overfit? Accuracy, NLL and ECE of X and X+MetaVD by round.

Every method has the same network and the same steps. Each is tested by the mean of its weights and
by ten draws, on clients that train and on held-out ones, after one step on the client's rows
(none for FedAvg). A line of the CSV is one score; what is in it already is not run again.

Run: python examples/papers/metavd/regimes.py [--quick] [--data NAME] [--methods NAME ...]
"""

import argparse
import csv
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import metavd

HERE = Path(__file__).parent
METHODS: dict[str, dict[str, Any]] = {
    "X": {"dropout": "none"},
    "X+MetaVD": {"dropout": "meta"},
    "X+MetaVD, hyper_lr=0.09": {"dropout": "meta", "hyper_lr": 0.09},
    "X+MetaVD, hyper_step=0.1": {"dropout": "meta", "hyper_step": 0.1},
    "X+VD": {"dropout": "vd"},
    "X+EnsembleVD": {"dropout": "ensemble"},
}
HEAD = ("method", "seed", "round", "population", "by", "metric", "value", "seconds", "commit")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--data", default="cifar10", help="a data set with classes")
parser.add_argument("--per-class", type=int, default=1000, help="training rows of all clients")
parser.add_argument("--partition", default="dirichlet:0.5,min=10")
parser.add_argument("--clients", type=int, default=30)
parser.add_argument("--held-out", type=int, default=10)
parser.add_argument("--net", default="mlp:128,64")
parser.add_argument("--on", default="reptile", help="X")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--hyper-lr", type=float, default=0.9)
parser.add_argument(
    "--rounds", type=int, nargs="+", default=[10, 20, 40, 60], help="that are tested"
)
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
parser.add_argument("--out", type=Path, default=HERE / "regimes.csv")
args = parser.parse_args()
rounds, seeds = ([1, 2], [0]) if args.quick else (args.rounds, args.seeds)

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))


def lines(name: str, seed: int) -> Iterator[tuple[Any, ...]]:
    """Train a method, and yield its scores after the rounds that are tested."""
    data = federations.split(
        dataset, args.partition, clients=args.clients, held_out=args.held_out, seed=seed
    )
    usual = {"on": args.on, "lr": args.lr, "hyper_lr": args.hyper_lr}
    method = metavd.build(net, **(usual | METHODS[name]))
    some = pyrofl.participation.fixed(10)
    run, seconds = None, 0.0
    for number in rounds:
        begun = perf_counter()
        run = pyrofl.fit(
            method, data, number, seed=seed, start=run, participation=some, progress=False
        )
        seconds += perf_counter() - begun
        for population in ("training", "held_out"):
            for by, draws in (("mean", None), ("draws", 10)):
                how = {"adapted": "adapt" if method.adapt else "none", "draws": draws}
                found = run.evaluate(population=population, **how)
                for metric in ("accuracy", "nll", "ece"):
                    yield name, seed, number, population, by, metric, found.mean(metric), seconds
        for what, value in run.records[-1].watched.items():
            yield name, seed, number, "training", "server", what, value, seconds


commit = subprocess.run(
    ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
).stdout.strip()
args.out.parent.mkdir(parents=True, exist_ok=True)
known = list(csv.DictReader(args.out.open())) if args.out.is_file() else []
done = {(line["method"], int(line["seed"])) for line in known}
with args.out.open("a", newline="") as file:
    table = csv.writer(file)
    if not known:
        table.writerow(HEAD)
    for seed in seeds:
        for name in (n for n in args.methods if (n, seed) not in done):
            found = [
                [f"{v:.6g}" if isinstance(v, float) else v for v in line]
                for line in lines(name, seed)
            ]
            table.writerows([*line, commit] for line in found)
            file.flush()
            print(f"seed {seed}, {name}: done", flush=True)
