"""Measure accuracy, NLL and ECE of X and X+MetaVD by round, on clients that overfit or underfit.

All methods have the same network and number of steps. Each is tested with the mean of its weights
and with ten draws, on training and held-out clients, after one step on the rows of the client
(none for FedAvg). A line of the CSV is one score; scores that it contains are not computed again.

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
FROM = 6  # pruning starts after this round: 15% of forty rounds, as in the authors' code
HEAD = ("method", "seed", "round", "population", "by", "metric", "value")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--full", action="store_true", help="Use the scale and the CNN of the paper.")
parser.add_argument("--data", default="cifar10", help="Data set with classes.")
parser.add_argument(
    "--per-class", type=int, default=1000, help="Training rows per class, over all clients."
)
parser.add_argument("--partition", default="dirichlet:0.5,min=10")
parser.add_argument("--clients", type=int, default=30)
parser.add_argument("--held-out", type=int, default=10)
parser.add_argument("--net", default="mlp:128,64")
parser.add_argument("--on", default="reptile", help="Base method X.")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--hyper-lr", type=float, default=0.9)
parser.add_argument(
    "--rounds",
    type=int,
    nargs="+",
    default=[10, 20, 40, 60],
    help="Rounds after which models are tested.",
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
    """Yield the scores of a method after the rounds that are tested."""
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
        run = pyrofl.fit(
            at, data, number, seed=seed, resume_from=run, participation=some, progress=False
        )
        for population in ("training", "held_out"):
            for by, draws in (("mean", None), ("draws", 10)):
                how = {"adaptation": "fine_tune" if method.adapt else "none", "draws": draws}
                found = run.evaluate(population=population, **how)
                for metric in ("accuracy", "nll", "ece"):
                    yield number, population, by, metric, found.mean(metric)
        for what, value in run.records[-1].watched.items():
            yield number, "training", "server", what, value
        yield number, "training", "server", "sparsity", float(run.statistics()["sparsity"].mean())


about = {"data": dataset.name, "rows": int((~dataset.is_test).sum()), "partition": args.partition}
about |= {"clients": args.clients, "held_out": args.held_out, "net": args.net}
about |= {"on": args.on, "lr": args.lr, "hyper_lr": args.hyper_lr}
runs = [(name, seed) for seed in args.seeds for name in args.methods]
files.fill(args.out, HEAD, runs, lines, **about)
