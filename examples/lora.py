"""Federate a small transformer by low-rank adapters: shared, personal, personal and Bayesian.

A transformer reads digits as eight words, the rows of pixels. It is trained on one set of images,
frozen, and given low-rank adapters (LoRA). Eight clients with 30 or 60 images each, whose scanners
mirror images or turn them upside down, train only the adapters. Accuracy, negative log likelihood
(NLL) and calibration error (ECE) are those of test images of the same scanner.

Run: python examples/lora.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from torch import nn

import pyrofl
from pyrofl import Federation, Network, datasets, figures, nets
from pyrofl.models import fedavg, local, pfedbayes
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with one round.")
parser.add_argument("--out", type=Path, default=Path("results/lora"))
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)


class Transformer(nn.Module):
    """Classifier of images [B, 8, 8], whose rows are the words."""

    def __init__(self, width: int = 24):
        """Create the layers."""
        super().__init__()
        self.pixels = nn.Linear(8, width)
        self.place = nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        """Return the logits of the classes, [B, 10]."""
        return self.last(self.layers(self.pixels(x) + self.place).mean(1))


digits = datasets.load("digits")
x, y = digits.x.reshape(-1, 8, 8), digits.y
public, *parts = torch.randperm(len(x), generator=generator(0)).split([600, *[150] * 7, 147])

base = Transformer()
optimizer = torch.optim.Adam(base.parameters(), lr=3e-3)
for _ in range(2 if args.quick else 40):
    for rows in public[torch.randperm(len(public))].split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(base(x[rows]), y[rows]).backward()
        optimizer.step()

flips = {"upright": (), "mirrored": (2,), "upside down": (1,), "turned": (1, 2)}
train, test, names = [], [], []
for j, rows in enumerate(parts):
    scanner = list(flips)[j % 4]
    x[rows] = x[rows].flip(flips[scanner])
    many = 30 if j < 4 else 60
    train.append(rows[:many])
    test.append(rows[many:])
    names.append(f"{scanner}, {many} images")
data = Federation(x, y, tuple(train), tuple(test), names=tuple(names), classes=digits.classes)

adapters = nets.lora(base, rank=2)
whole = Network(base, pretrained=True)
how = {"epochs": 1 if args.quick else 4, "batch": 15}
# Which adapters are trained -> method, and posterior draws for its predictions
methods = {
    "none": (fedavg.build(adapters, epochs=0), None),
    "whole network": (fedavg.build(whole, lr=0.03, **how), None),
    "shared": (fedavg.build(adapters, lr=0.03, **how), None),
    "personal": (local.build(adapters, lr=0.03, **how), None),
    "Bayesian": (
        pfedbayes.build(adapters, init_scale=0.1, steps=3, **how),
        50,
    ),
}
rows, scores, found = [], {}, {}
for name, (method, draws) in methods.items():
    run = pyrofl.fit(method, data, 1 if args.quick else 10, progress=False)
    found[name] = run.evaluate(draws=draws)
    sent = 0 if name == "none" else int(run.state.bytes_up[0])
    means = {m: found[name].mean(m) for m in ("accuracy", "nll", "ece")}
    rows.append({"": name, **means, "bytes sent by a client per round": sent})

print("Means over clients")
print(pd.DataFrame(rows).set_index("").round(3).to_string())
for metric in ("accuracy", "nll", "ece"):
    table = {name: found[name].values[metric].tolist() for name in methods}
    print(f"\n{metric} by client")
    print(pd.DataFrame(table, index=names).round(2).to_string())
values = {name: found[name].values["nll"] for name in list(methods)[2:]}
figures.save(figures.clients(data.sizes, values, "nll"), args.out / "lora.png")
print(f"figure: {args.out / 'lora.png'}")
