"""Where does MetaVD gain: where clients overfit? Accuracy, NLL and ECE of X and X+MetaVD by round.

Every method has the same network and the same steps. Each is tested by the mean of its weights and
by ten draws, on clients that train and on held-out ones, after one step on the client's rows
(none for FedAvg). A line of the CSV is one score; what is in it already is not run again.

Run: python examples/papers/metavd/regimes.py [--quick] [--full] [--data NAME] [--methods NAME ...]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import metavd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from papers import files  # noqa: E402

METHODS: dict[str, dict[str, Any]] = {
    "X": {"dropout": "none"},
    "X+MetaVD": {"dropout": "meta"},
    "X+MetaVD, hyper_lr=0.09": {"dropout": "meta", "hyper_lr": 0.09},
    "X+MetaVD, hyper_step=0.1": {"dropout": "meta", "hyper_step": 0.1},
    "X+VD": {"dropout": "vd"},
    "X+EnsembleVD": {"dropout": "ensemble"},
    "X+MetaVD, pruned": {"dropout": "meta", "prune": 0.9},
    "X, SNIP": {"dropout": "none", "prune": "snip"},
}
FROM = 6  # the round after which rates prune: 15% of forty rounds, as the authors have it
HEAD = ("method", "seed", "round", "population", "by", "metric", "value")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--full", action="store_true", help="the paper's own scale, with its CNN")
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
if args.full:
    args.clients, args.held_out, args.net, args.lr = 100, 30, "cnn-metavd", 0.02
    args.rounds = [100, 300, 1000]
if args.quick:
    args.data, args.clients, args.held_out, args.net = "digits", 10, 3, "mlp:20,10"
    args.methods, args.rounds, args.seeds = ["X", "X+MetaVD, pruned"], [1, 2], [0]

dataset = datasets.load(args.data)
if not args.full:
    dataset = datasets.per_class(dataset, args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))


def lines(name: str, seed: int) -> Iterator[tuple[Any, ...]]:
    """Train a method, and yield its scores after the rounds that are tested."""
    data = federations.split(
        dataset, args.partition, clients=args.clients, held_out=args.held_out, seed=seed
    )
    usual = {"on": args.on, "lr": args.lr, "hyper_lr": args.hyper_lr} | METHODS[name]
    dense = {n: v for n, v in usual.items() if (n, v) != ("prune", 0.9)}
    before, method = metavd.build(net, **dense), metavd.build(net, **usual)

    def at(number: int) -> pyrofl.Method:
        return method if number > FROM else before

    some = pyrofl.participation.fixed(10)
    run = None
    for number in args.rounds:
        run = pyrofl.fit(at, data, number, seed=seed, start=run, participation=some, progress=False)
        for population in ("training", "held_out"):
            for by, draws in (("mean", None), ("draws", 10)):
                how = {"adapted": "adapt" if method.adapt else "none", "draws": draws}
                found = run.evaluate(population=population, **how)
                for metric in ("accuracy", "nll", "ece"):
                    yield number, population, by, metric, found.mean(metric)
        for what, value in run.records[-1].watched.items():
            yield number, "training", "server", what, value
        yield number, "training", "server", "sparsity", float(run.statistics()["sparsity"].mean())


about = {"data": dataset.name, "rows": int((~dataset.is_test).sum()), "partition": args.partition}
about |= {"clients": args.clients, "held_out": args.held_out, "net": args.net}
about |= {"on": args.on, "lr": args.lr, "hyper_lr": args.hyper_lr}
asked = [(name, seed) for seed in args.seeds for name in args.methods]
files.fill(args.out, HEAD, asked, lines, **about)
