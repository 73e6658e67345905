"""Analyze the clients' posteriors with ArviZ: summary, forest plot and pair plot.

Run: python examples/posterior_arviz.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

import pyrofl
from pyrofl import datasets, federations, guides, nets
from pyrofl.inference.posteriors import export
from pyrofl.models import pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--out", type=Path, default=Path("results/posterior_arviz"))
args = parser.parse_args()
az = export.import_arviz()

data = federations.split(datasets.load("digits"), "slices:5", clients=8)
net = nets.build("mlp:20", input_shape=(64,), outputs=10)
run = pyrofl.fit(pfedvem.build(net, lr_base=0.01), data, rounds=2 if args.quick else 20)

# One variable per parameter of the head, with dims chain, draw, client and those of the parameter.
posterior = run.to_arviz(draws=500, dims={name: net.dims(name) for name in net.shapes})
args.out.mkdir(parents=True, exist_ok=True)
export.save(posterior, args.out / "posterior.nc")

# The bias of the logit of digit 3 at every client.
three = {"var_names": ["head.bias"], "coords": {"head_out": [3]}}
print(az.summary(posterior, kind="stats", **three))
az.plot_forest(posterior, combined=True, **three)
plt.gcf().savefig(args.out / "forest.png", bbox_inches="tight")
plt.close("all")

# The joint posterior of the biases of digits 3 and 5 at the client with most rows, by a mean-field
# guide, which has no correlations, and by a guide with full covariance.
full = pfedvem.build(net, lr_base=0.01, guide=guides.full_covariance)
other = pyrofl.fit(full, data, rounds=2 if args.quick else 20)
largest = int(data.sizes.argmax())
figure, grid = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True, layout="constrained")
for axes, (name, one) in zip(grid, {"mean field": run, "full": other}.items(), strict=True):
    drawn = one.posterior(4000)["head.bias"][:, largest, [3, 5]].T
    drawn = drawn - drawn.mean(1, keepdim=True)
    axes.plot(*drawn, ".", markersize=2, alpha=0.3)
    axes.set_title(f"{name}: correlation {float(torch.corrcoef(drawn)[0, 1]):.2f}")
    axes.set_xlabel("bias of digit 3 (logits, minus its mean)")
grid[0].set_ylabel("bias of digit 5 (logits, minus its mean)")
figure.savefig(args.out / "pair.png", bbox_inches="tight")
print(f"figures: {args.out / 'forest.png'}, {args.out / 'pair.png'}")
