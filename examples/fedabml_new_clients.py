"""Measure the accuracy of held-out clients after epochs of fine-tuning (FedABML, table 2).

FedABML is fine-tuned with one step per minibatch, as the other methods, and with five, as in its
training. Five epochs of the former have as many steps as one epoch of the latter. In training,
FedABML also takes five times the steps of the others, unless k is 1; "25 epochs" is FedAvg with the
same number of steps.

Run: python examples/fedabml_new_clients.py [--data npz:PATH] [--quick] [--full] [--out FOLDER]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from papers import files, plots

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedabml, fedavg, fedprox

HEAD = ("clients", "rows", "rounds", "method", "seed", "epochs", "steps", "accuracy")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--full", action="store_true", help="Use the scale and the CNN of the paper.")
parser.add_argument("--data", default="digits", help="digits, or images such as npz:PATH.")
parser.add_argument("--labels", type=int, default=2, help="Maximum number of labels per client.")
parser.add_argument(
    "--clients", type=int, default=50, help="Number of clients; a fifth of them trains."
)
parser.add_argument("--per-class", type=int, default=500, help="Training rows per class.")
parser.add_argument("--net", default="softmax")
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("results/fedabml_new_clients"))
args = parser.parse_args()
few, many = (0, 1, 2, 5, 10), (25,)
if args.full:
    args.clients, args.rounds, args.seeds, args.net = 100, 100, 5, "cnn-fedabml"
if args.quick:
    args.rounds, args.seeds, few, many = 2, 1, (0, 1, 2), ()

# Learning rates from 0.003 to 0.3, best or nearly best for each method on the training clients.
plain = {"lr": 0.03, "momentum": 0.0, "batch": 50}
common = {"kl": 0.01, "num_particles": 2, "epochs": 5, "lr": 0.1}
methods = {
    "FedABML": lambda tune: fedabml.build(net, fine_tune=tune, **common),
    "FedABML, 5 steps a batch": lambda tune: fedabml.build(
        net, fine_tune=tune, tune_steps=5, **common | {"lr": 0.03}
    ),
    "FedABML, k = 1": lambda tune: fedabml.build(net, steps=1, fine_tune=tune, **common),
    "FedAvg+FT": lambda tune: fedavg.build(net, fine_tune=tune, **plain),
    "FedAvg+FT, 25 epochs": lambda tune: fedavg.build(net, epochs=25, fine_tune=tune, **plain),
    "FedProx+FT": lambda tune: fedprox.build(net, mu=0.05, fine_tune=tune, **plain),
}
TRAINED = {"FedABML, 5 steps a batch": "FedABML"}  # the two differ in fine-tuning only
dataset = datasets.load(args.data)
if not args.full:
    dataset = datasets.per_class(dataset, args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))


def measure(
    clients: int, rows: int, rounds: int, name: str, seed: int
) -> Iterator[tuple[int, int, float]]:
    """Yield epochs, steps per batch and accuracy of the held-out clients."""
    train = max(2, clients // 5)
    data = federations.split(
        dataset, f"labels:{args.labels}", train, seed=seed, held_out=clients - train
    )
    some, build = pyrofl.participation.fraction(0.5), methods[name]
    first = methods[TRAINED.get(name, name)](0)
    *_, state = pyrofl.federate(first, data, rounds, seed=seed, participation=some)
    steps = 5 if "5 steps" in name else 1
    for epochs in few if steps > 1 else (*few, *many):
        what = {"model": "personal", "adaptation": "fine_tune"} if epochs else {"model": "global"}
        scores = pyrofl.evaluate(
            build(epochs), data, state, population="held_out", seed=seed, **what
        )
        yield epochs, steps, scores.mean("accuracy")


total = int((~dataset.is_test).sum())
names = [*methods][:2] if args.quick else [*methods]
runs = [(args.clients, total, args.rounds, n, s) for s in range(args.seeds) for n in names]
about = {"data": dataset.name, "labels": args.labels, "net": args.net}
lines = files.fill(args.out / "new_clients.csv", HEAD, runs, measure, **about)
for name, some in files.by(lines, "method").items():
    print(f"{name}: accuracy after epochs of fine-tuning")
    print(files.means(files.by(some, "epochs"), {"accuracy": 100}))
curves = {
    name: [
        [float(line["accuracy"]) for line in run if int(line["epochs"]) in few]
        for run in files.by(some, "seed").values()
    ]
    for name, some in files.by(lines, "method").items()
}
figures.save(plots.after_epochs(few, curves), args.out / "new_clients.png")
print(f"Results saved to {args.out}: new_clients.csv, new_clients.png")
