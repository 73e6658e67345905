"""Fit pFedVEM on real digits, test it, and draw how sure every client is.

Run: python examples/quickstart.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import local, pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--out", type=Path, default=Path("results/quickstart"))
args = parser.parse_args()

# Twenty clients; each has five of the ten digits, and some have far fewer rows than others.
digits = datasets.load("digits")
data = federations.split(digits, "slices:5", clients=20, test="labels_global")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)

for method in (local.build(net), pfedvem.build(net, lr_base=0.01)):
    run = pyrofl.fit(method, data, rounds=2 if args.quick else 20)
    for model in method.views:
        scores = run.evaluate(model=model)
        print(
            f"{model} model: accuracy {scores.mean('accuracy'):.3f}, nll {scores.mean('nll'):.3f}"
        )

# The confidence tau_j of every client, and how far its head is from the common one.
known = run.statistics()
sizes = data.sizes[: data.clients]
figures.save(
    figures.confidence(known["tau"], known["deviation"], sizes), args.out / "confidence.png"
)
print(f"figure: {args.out / 'confidence.png'}")
