"""Fit pFedVEM to handwritten digits, and plot the gain of every client over local training.

Run: python examples/quickstart.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import local, pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--out", type=Path, default=Path("results/quickstart"))
args = parser.parse_args()

# Twenty clients; each has five of the ten digits, and the numbers of rows differ widely.
digits = datasets.load("digits")
data = federations.split(digits, "slices:5", clients=20, test="same_classes")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)

methods = {"local": local.build(net), "pFedVEM": pfedvem.build(net, lr_base=0.01)}
accuracy = {}
for name, method in methods.items():
    run = pyrofl.fit(method, data, rounds=2 if args.quick else 20)
    for model in method.views:
        scores = run.evaluate(model=model)
        accuracy.setdefault(name, scores.values["accuracy"])
        print(
            f"{name}, {model} model: accuracy {scores.mean('accuracy'):.3f}, "
            f"nll {scores.mean('nll'):.3f}"
        )

# Accuracy of the personal model of every client; clients with few rows gain most.
figure = figures.clients(data.sizes[: data.clients], accuracy, "accuracy")
figures.save(figure, args.out / "clients.png")
print(f"figure: {args.out / 'clients.png'}")
