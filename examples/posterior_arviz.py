"""Study the clients' posteriors in ArviZ: summary, forest plot and pair plot.

Run: python examples/posterior_arviz.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.inference.posteriors import export
from pyrofl.models import pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--out", type=Path, default=Path("results/posterior_arviz"))
args = parser.parse_args()
az = export.import_arviz()

data = federations.split(datasets.load("digits"), "slices:5", clients=8)
net = nets.build("mlp:20", input_shape=(64,), outputs=10)
run = pyrofl.fit(pfedvem.build(net, lr_base=0.01), data, rounds=2 if args.quick else 20)

# One variable per parameter of the head, with dims chain, draw, client and its own axes.
posterior = run.to_arviz(draws=500, dims={name: net.dims(name) for name in net.shapes})
args.out.mkdir(parents=True, exist_ok=True)
export.save(posterior, args.out / "posterior.nc")

# How every client sees the digit 3: the offset of its logit.
three = {"var_names": ["head.bias"], "coords": {"head_out": [3]}}
print(az.summary(posterior, kind="stats", **three))
az.plot_forest(posterior, combined=True, **three)
plt.gcf().savefig(args.out / "forest.png", bbox_inches="tight")
plt.close("all")

# What the client with most rows thinks of the digits 3, 5 and 8 together.
largest = data.names[int(data.sizes.argmax())]
coords = {"client": [largest], "head_out": [3, 5, 8]}
az.plot_pair(posterior, var_names=["head.bias"], coords=coords)
plt.gcf().savefig(args.out / "pair.png", bbox_inches="tight")
print(f"figures: {args.out / 'forest.png'}, {args.out / 'pair.png'}")
