"""Run FedRep with clients in chunks of two sizes, which changes rounding only.

100 clients with five of ten labels, as in pFedVEM's table 1, at the learning rate of that table and
at the one that the tuning chose. Differences of accuracy between the chunk sizes show how far
rounding errors grow.

Run: python examples/papers/pfedvem/rounding.py --data npz:fashion_mnist.npz [--quick] [--out FILE]
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from papers import files

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.models import fedrep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--data", default="digits", help="Data set with ten classes.")
parser.add_argument("--clients", type=int, default=100)
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--per-class", type=int, default=200)
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[100, 10])
parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.01])
parser.add_argument("--out", type=Path, default=Path("results/rounding.csv"))
args = parser.parse_args()
if args.quick:
    args.clients, args.rounds, args.per_class, args.seeds = 10, 2, 20, [0]

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
net = nets.build("mlp:50", tuple(dataset.x.shape[1:]), len(dataset.classes))


def measure(rate: float, chunk_size: int, seed: int) -> Iterator[list[float]]:
    """Return the mean accuracy of personal models, in percent."""
    data = federations.split(dataset, "slices:5", args.clients, seed=seed, test="same_classes")
    run = pyrofl.fit(
        fedrep.build(net, lr=rate),
        data,
        args.rounds,
        seed=seed,
        participation=pyrofl.participation.bernoulli(0.3),
        chunk_size=chunk_size,
        progress=False,
    )
    yield [100 * run.evaluate(model="personal").mean("accuracy")]


runs = [
    (rate, size, seed) for rate in args.rates for size in args.chunk_sizes for seed in args.seeds
]
about = {"data": dataset.name, "clients": args.clients, "rounds": args.rounds}
head = ("lr", "chunk_size", "seed", "personal")
lines = files.fill(args.out, head, runs, measure, **about)
for line in lines:
    print(*(f"{name} {line[name]}" for name in head))
