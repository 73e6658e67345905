"""Compare mixtures of three clients' models on the Swiss roll (FedBE, figure 1) over fifty seeds.

The paper reports 69% accuracy for an ensemble of ten mixtures and 64% for FedAvg, on one roll.
With its learning rates, the ensemble is better than FedAvg on 28 to 31 of fifty rolls, by 0 to 2
points on average with a standard deviation of 4 to 8. A single roll is therefore not conclusive.
The best of 100 mixtures is 10 to 15 points above the center (FedAvg), but labels are needed to
find it.

Run: python examples/fedbe_swiss_roll.py [--quick] [--lr RATE ...] [--out FOLDER]
"""

import argparse
import itertools
from pathlib import Path

import torch
from papers import files, plots
from sklearn.datasets import make_swiss_roll

import pyrofl
from pyrofl import Federation, figures, nets
from pyrofl.models import fedbe
from pyrofl.models.fedbe.posteriors import sample
from pyrofl.models.shared.distillation import predictions
from pyrofl.tensors import Tensors, generator, role

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument(
    "--lr",
    type=float,
    nargs="+",
    default=[0.003],
    help="Learning rates; the paper uses 1e-3 to 3e-3.",
)
parser.add_argument("--seeds", type=int, default=50, help="Number of rolls and initial states.")
parser.add_argument("--out", type=Path, default=Path("results/fedbe_swiss_roll"))
args = parser.parse_args()
seeds, rounds, steps = (2, 2, 6) if args.quick else (args.seeds, 10, 24)
net = nets.build("mlp:32", input_shape=(2,), outputs=3)


def roll(seed: int) -> Federation:
    """Return three clients; classes are thirds of the roll, one of which dominates each client."""
    points, along = make_swiss_roll(3000, noise=1.0, random_state=seed)
    x = torch.from_numpy(points[:, [0, 2]] / 10).float()
    y = torch.from_numpy(along).argsort().argsort() // 1000
    by_class = [(y == c).nonzero().flatten() for c in range(3)]
    train = []
    for j in range(3):
        row = [80 if c == j else 10 for c in range(3)]
        train.append(torch.cat([rows[:n] for rows, n in zip(by_class, row, strict=True)]))
        by_class = [rows[n:] for rows, n in zip(by_class, row, strict=True)]
    test = (torch.cat(by_class),) * 3
    return Federation(x, y, tuple(train), test, ("A", "B", "C"), ("class 0", "class 1", "class 2"))


def fit(seed: int, lr: float) -> pyrofl.Run:
    """Fit FedAvg with an additional ensemble of ten mixtures at the server."""
    method = fedbe.build(
        net, posterior="dirichlet", alpha=0.5, samples=10, teachers="S", distil="none",
        epochs=2, batch=10, lr=lr,
    )  # fmt: skip
    return pyrofl.fit(method, roll(seed), rounds=rounds, seed=seed, progress=False)


def right(run: pyrofl.Run, models: Tensors) -> torch.Tensor:
    """Return whether models [M, *p] classify the test rows correctly: [M, rows]."""
    test = run.data.test[0]
    return predictions(net, models, run.data.x[test]).argmax(-1) == run.data.y[test]


def mixed(run: pyrofl.Run) -> Tensors:
    """Return 100 mixtures of the clients' models of the last round."""
    drawn = sample(
        fedbe.dirichlet(role("w", run.state.message), run.state.reporters.size, 0.5),
        100,
        generator(1),
    )
    return {n: drawn[n] for n in net.shapes}


def scores(run: pyrofl.Run) -> tuple[float, float, float]:
    """Return the accuracy in percent of FedAvg, the ensemble and the best of 100 mixtures."""
    each = right(run, mixed(run)).double().mean(1)
    means = (run.evaluate(model=model).mean("accuracy") for model in ("global", "ensemble"))
    return (*(100 * value for value in means), 100 * float(each.max()))


head = ("lr", "seed", "fedavg", "ensemble", "best_of_100")
runs = [(lr, seed) for lr in args.lr for seed in range(seeds)]
lines = files.fill(
    args.out / "swiss_roll.csv", head, runs, lambda lr, seed: [scores(fit(seed, lr))], rounds=rounds
)
print(files.means(files.by(lines, "lr"), dict.fromkeys(head[2:], 1)))
panels = {}
for lr, some in files.by(lines, "lr").items():
    found = torch.tensor([[float(line[name]) for name in head[2:]] for line in some])
    gain = found[:, 1:] - found[:, :1]
    panels[f"learning rate {lr}"] = {
        "ensemble of ten mixtures": gain[:, 0],
        "best of 100 mixtures": gain[:, 1],
    }
figures.save(
    plots.histograms(panels, "difference in accuracy from FedAvg (percentage points)"),
    args.out / "histogram.png",
)

# Mixtures of the clients' models of the first roll on a grid; all clients have equally many rows.
run = fit(0, args.lr[-1])
clients = role("w", run.state.message)
grid = torch.tensor([w for w in itertools.product(range(steps + 1), repeat=3) if sum(w) == steps])
share = grid / steps
mixtures = {n: torch.tensordot(share, v, 1) for n, v in clients.items()}
accuracy = right(run, mixtures).float().mean(1)
best = int(accuracy.argmax())
marks = {
    "FedAvg": ([1 / 3] * 3, run.evaluate(model="global").mean("accuracy")),
    "best mixture": (share[best].tolist(), float(accuracy[best])),
    "ensemble of ten mixtures": (None, run.evaluate(model="ensemble").mean("accuracy")),
}
figures.save(plots.simplex(share, accuracy, marks, run.data.names), args.out / "simplex.png")
test = run.data.x[run.data.test[0]]
sure = {
    name: (predictions(net, models, test).amax(-1), right(run, models))
    for name, models in (("clients", clients), ("mixtures", mixed(run)))
}
figures.save(plots.confidence_histogram(sure), args.out / "confidence.png")
print(f"figures: {', '.join(str(args.out / n) for n in ('histogram.png', 'simplex.png'))}")
