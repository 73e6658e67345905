"""Do clients notice strange data? Entropy of their predictions, in and out of distribution.

Without --ood the strange data are the same images with their pixels shuffled.

Run: python examples/fedabml_entropy.py [--quick] [--data npz:PATH] [--ood npz:PATH] [--out FOLDER]
"""

import argparse
from pathlib import Path

import torch

import pyrofl
from pyrofl import checks, datasets, federations, figures, nets
from pyrofl.models import fedabml
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--data", default="digits", help="digits, or images such as npz:PATH")
parser.add_argument("--ood", help="images of the same shape, such as npz:PATH")
parser.add_argument("--clients", type=int, default=10)
parser.add_argument("--per-class", type=int, default=300, help="training rows of each class")
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--draws", type=int, default=20, help="of every posterior")
parser.add_argument("--out", type=Path, default=Path("results/fedabml_entropy"))
args = parser.parse_args()

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
data = federations.split(dataset, "labels:5", args.clients)
known = dataset.x[dataset.is_test][:500]
if args.ood:
    other = datasets.load(args.ood)
    strange = other.x[other.is_test][:500]
else:
    flat = known.flatten(1)
    strange = flat[:, torch.randperm(flat.shape[1], generator=generator(0))].view_as(known)

net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
method = fedabml.build(net, epochs=5, draws=2)
run = pyrofl.fit(
    method,
    data,
    2 if args.quick else args.rounds,
    participation=pyrofl.participation.fraction(0.5),
    progress=False,
)

found = {}
for name, rows in (("known", None), ("strange", strange)):  # the clients' own test rows, or these
    how = {"draws": args.draws, "adapted": "adapt"}
    found[name] = checks.uncertainty(method, data, run.state, rows, **how).by_client("total")
for name, values in found.items():
    print(f"{name}: mean entropy {torch.cat(values).mean():.3f} nats")
figures.save(figures.densities(found, len(dataset.classes)), args.out / "entropy.png")
print(f"figure: {args.out / 'entropy.png'}")
