"""Three clients, three classes: which mixtures of their models are best? FedBE's figure 1.

Its authors found an ensemble of ten mixtures to be better than FedAvg (69% against 64%). On this
roll FedAvg, in the middle of the triangle, is close to the best mixture, and the ensemble below it.

Run: python examples/fedbe_swiss_roll.py [--quick] [--out FOLDER]
"""

import argparse
import itertools
from pathlib import Path

import torch
from sklearn.datasets import make_swiss_roll

import pyrofl
from pyrofl import Federation, figures, nets
from pyrofl.models import fedbe
from pyrofl.models.fedbe.distillation import predictions
from pyrofl.models.fedbe.posteriors import dirichlet, sample
from pyrofl.tensors import generator, role

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--out", type=Path, default=Path("results/fedbe_swiss_roll"))
args = parser.parse_args()

# Classes are the thirds of the roll; a client has 80% of its rows from one of them.
points, along = make_swiss_roll(3000, noise=1.0, random_state=0)
x = torch.from_numpy(points[:, [0, 2]] / 10).float()
y = torch.from_numpy(along).argsort().argsort() // 1000
by_class = [(y == c).nonzero().flatten() for c in range(3)]
deal = [[80 if c == j else 10 for c in range(3)] for j in range(3)]
train = []
for row in deal:
    train.append(torch.cat([rows[:n] for rows, n in zip(by_class, row, strict=True)]))
    by_class = [rows[n:] for rows, n in zip(by_class, row, strict=True)]
test = torch.cat(by_class)
names = ("class 0", "class 1", "class 2")
data = Federation(x, y, tuple(train), (test,) * 3, ("A", "B", "C"), names)

# FedAvg of a two-layer network; its server also keeps an ensemble of ten mixtures.
net = nets.build("mlp:32", input_shape=(2,), outputs=3)
method = fedbe.build(
    net, posterior="dirichlet", alpha=0.5, samples=10, teachers="S", distil="none",
    epochs=2, batch=10, lr=0.01,
)  # fmt: skip
run = pyrofl.fit(method, data, rounds=2 if args.quick else 10, progress=False)
ensemble = run.evaluate(model="ensemble").mean("accuracy")


def right(models: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return which test rows each model [M, *p] gets right: [M, rows]."""
    return predictions(net, models, x[test]).argmax(-1) == y[test]


# The clients' models of the last round, mixed on a grid: all have as many rows.
clients = role("w", run.state.message)
steps = 6 if args.quick else 24
grid = torch.tensor([w for w in itertools.product(range(steps + 1), repeat=3) if sum(w) == steps])
share = grid / steps
mixed = {n: torch.tensordot(share, v, 1) for n, v in clients.items()}
accuracy = right(mixed).float().mean(1)
best = int(accuracy.argmax())
centre = right({n: v.mean(0, keepdim=True) for n, v in clients.items()}).float().mean()
marks = {
    "FedAvg": ([1 / 3] * 3, float(centre)),
    "best mixture": (share[best].tolist(), float(accuracy[best])),
    "ensemble of ten mixtures": (None, ensemble),
}
for name, (_, value) in marks.items():
    print(f"{name}: {100 * value:.1f}%")

drawn = sample(dirichlet(clients, run.state.who.size, 0.5), 100, generator(1))
panels = {}
for name, models in (("clients", clients), ("mixtures", {n: drawn[n] for n in clients})):
    panels[name] = (predictions(net, models, x[test]).amax(-1), right(models))
figures.save(figures.simplex(share, accuracy, marks, data.names), args.out / "simplex.png")
figures.save(figures.confidence_histogram(panels), args.out / "confidence.png")
print(f"figures: {args.out / 'simplex.png'}, {args.out / 'confidence.png'}")
