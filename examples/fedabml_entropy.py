"""Compare the entropy of predictions in and out of distribution (FedABML, figure 5).

Without --ood, the out-of-distribution data are the same images with shuffled pixels. Fine-tuned
FedAvg is the baseline: a single model without a posterior.

Run: python examples/fedabml_entropy.py [--data npz:PATH] [--ood npz:PATH] [--quick] [--out FOLDER]
"""

import argparse
from functools import cache
from pathlib import Path
from typing import Any

import torch
from papers import files

import pyrofl
from pyrofl import checks, datasets, federations, figures, nets
from pyrofl.models import fedabml, fedavg
from pyrofl.tensors import generator

HEAD = ("method", "seed", "accuracy", "in_distribution", "out_of_distribution", "auroc")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--data", default="digits", help="digits, or images such as npz:PATH.")
parser.add_argument("--ood", help="Out-of-distribution images of the same shape, such as npz:PATH.")
parser.add_argument("--clients", type=int, default=10)
parser.add_argument("--per-class", type=int, default=300, help="Training rows per class.")
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--draws", type=int, default=20, help="Draws of every posterior.")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("results/fedabml_entropy"))
args = parser.parse_args()
print("A full run takes about ten minutes on one core; --quick takes seconds.", flush=True)
rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
known = dataset.x[dataset.is_test][:500]
if args.ood:
    other = datasets.load(args.ood)
    other_rows = other.x[other.is_test][:500]
else:
    flat = known.flatten(1)
    other_rows = flat[:, torch.randperm(flat.shape[1], generator=generator(0))].view_as(known)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
METHODS = {
    "FedABML": (fedabml.build(net, epochs=5, num_particles=2), args.draws),
    "FedAvg, fine-tuned": (fedavg.build(net, lr=0.03, momentum=0.0, fine_tune=5), 1),
}


@cache
def evaluated(name: str, seed: int) -> tuple[pyrofl.Run, dict[str, Any]]:
    """Return the run and the uncertainty of every client for its test rows and for other rows."""
    method, draws = METHODS[name]
    data = federations.split(dataset, "labels:5", args.clients, seed=seed)
    some = pyrofl.participation.fraction(0.5)
    run = pyrofl.fit(method, data, rounds, seed=seed, participation=some, progress=False)
    how = {"draws": draws, "adaptation": "fine_tune", "model": "personal", "seed": seed}
    both = {"in_distribution": None, "out_of_distribution": other_rows}
    return run, {
        word: checks.uncertainty(method, data, run.state, rows, **how)
        for word, rows in both.items()
    }


def measure(name: str, seed: int) -> list[list[float]]:
    """Return accuracy, mean entropies and the AUROC of entropy for out-of-distribution rows."""
    run, found = evaluated(name, seed)
    how = {"model": "personal", "adaptation": "fine_tune", "draws": METHODS[name][1]}
    means = [
        float(found[word].mean("total").mean())
        for word in ("in_distribution", "out_of_distribution")
    ]
    auroc = found["in_distribution"].told_apart(found["out_of_distribution"], "total")
    return [[run.evaluate(**how).mean("accuracy"), *means, float(auroc.mean())]]


about = {
    "data": dataset.name,
    "ood": other.name if args.ood else "shuffled",
    "clients": args.clients,
}
about |= {"rows": int((~dataset.is_test).sum()), "net": args.net, "rounds": rounds}
names = ["FedABML"] if args.quick else [*METHODS]
runs = [(name, seed) for name in names for seed in range(seeds)]
lines = files.fill(args.out / "entropy.csv", HEAD, runs, measure, draws=args.draws, **about)
columns = {"accuracy": 100, "in_distribution": 1, "out_of_distribution": 1, "auroc": 100}
print(files.means(files.by(lines, "method"), columns))
_, found = evaluated("FedABML", 0)
shown = {
    "in distribution": found["in_distribution"].by_client("total"),
    "out of distribution": found["out_of_distribution"].by_client("total"),
}
figures.save(figures.entropies(shown, len(dataset.classes)), args.out / "entropy.png")
print(f"Results saved to {args.out}: entropy.csv, entropy.png")
