"""Compare uncertainty scores as detectors of unknown classes: digits 5 to 9, not in training.

The scores of a row are one minus the largest probability, the entropy of the prediction, and its
epistemic part, which more training rows would reduce. It is zero for a point estimate.

Run: python examples/out_of_distribution.py [--quick] [--seeds N] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

import pyrofl
from pyrofl import checks, datasets, federations, figures, guides, nets, priors
from pyrofl.models import fedabml, fedavg, pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--seeds", type=int, default=1, help="Number of seeds, of partition and fit.")
parser.add_argument("--out", type=Path, default=Path("results/out_of_distribution"))
args = parser.parse_args()
torch.set_num_threads(1)

digits = datasets.load("digits")
known = digits.y < 5
inside = replace(
    digits,
    x=digits.x[known],
    y=digits.y[known],
    is_test=digits.is_test[known],
    classes=digits.classes[:5],
)
unknown = digits.x[~known]
net = nets.build("mlp:50", (64,), 5)
standard = priors.fixed(scale=1.0)
# name -> method, posterior draws, adaptation before the test
methods = {
    "FedAvg": (fedavg.build(net), None, "none"),
    "FedAvg, mean field": (
        fedavg.build(net, guide=guides.mean_field, prior=standard, num_particles=3),
        100,
        "none",
    ),
    "pFedVEM": (pfedvem.build(net, lr_base=0.01, lr_head=0.01), 100, "none"),
    "FedABML": (fedabml.build(net, epochs=5, num_particles=2), 100, "fine_tune"),
}
rows, entropy = [], {}
for seed in range(args.seeds):
    data = federations.split(inside, "labels:3", 10, seed=seed)
    for name, (method, draws, adaptation) in methods.items():
        run = pyrofl.fit(method, data, 2 if args.quick else 20, seed=seed, progress=False)
        how = {"draws": draws, "adaptation": adaptation, "seed": seed}
        mine = checks.uncertainty(method, data, run.state, **how)
        other = checks.uncertainty(method, data, run.state, unknown, **how)
        row = {"method": name, "accuracy": run.evaluate(**how).mean("accuracy")}
        row |= {s: float(mine.told_apart(other, s).mean()) for s in ("doubt", "total", "epistemic")}
        rows.append(row)
        if not seed and name in ("FedAvg", "pFedVEM"):
            entropy[f"{name}, digits 0 to 4"] = mine.by_client("total")
            entropy[f"{name}, digits 5 to 9"] = other.by_client("total")
        if not seed and name == "pFedVEM":
            bins = checks.calibration_by_client(method, data, run.state, bins=5, **how)

table = pd.DataFrame(rows).groupby("method", sort=False).mean()
print(f"AUROC for digits 5 to 9 against test rows of the client, mean of {args.seeds} seed(s)")
print(table.round(3).to_string())
figures.save(figures.entropies(entropy, 5), args.out / "entropy.png")
figures.save(figures.reliability_by_client(bins), args.out / "reliability.png")
print(f"figures: {args.out / 'entropy.png'}, {args.out / 'reliability.png'}")
