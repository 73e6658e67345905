"""How fast do clients that never trained learn? Accuracy after epochs of fine-tuning (FedABML).

FedABML is fine-tuned with one step for each minibatch, as the others, and with five, as it trains.

Run: python examples/fedabml_new_clients.py [--quick] [--data npz:PATH] [--out FOLDER]
"""

import argparse
from pathlib import Path

import numpy as np

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.files.run_folder import table
from pyrofl.models import fedabml, fedavg, fedprox

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--data", default="digits", help="digits, or images such as npz:PATH")
parser.add_argument("--labels", type=int, default=2, help="at most so many labels per client")
parser.add_argument("--clients", type=int, default=50, help="a fifth of them trains")
parser.add_argument("--per-class", type=int, default=1000, help="training rows of each class")
parser.add_argument("--net", default="softmax")
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("results/fedabml_new_clients"))
args = parser.parse_args()
rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)
epochs = (0, 1, 2) if args.quick else (0, 1, 2, 3, 5, 10)

# Learning rates, out of 0.003 to 0.3: best or near it for each on the clients that train.
plain = {"lr": 0.03, "momentum": 0.0, "batch": 50}
common = {"lr": 0.03, "kl": 0.01, "draws": 2, "epochs": 5}
methods = {
    "FedABML": lambda tune: fedabml.build(net, fine_tune=tune, **common | {"lr": 0.1}),
    "FedABML, 5 steps a batch": lambda tune: fedabml.build(
        net, fine_tune=tune, tune_steps=5, **common
    ),
    "FedAvg+FT": lambda tune: fedavg.build(net, fine_tune=tune, **plain),
    "FedProx+FT": lambda tune: fedprox.build(net, mu=0.05, fine_tune=tune, **plain),
}
dataset = datasets.per_class(datasets.load(args.data), args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
curves: dict[str, list[list[float]]] = {name: [] for name in methods}
for seed in range(seeds):
    train = max(2, args.clients // 5)
    data = federations.split(
        dataset, f"labels:{args.labels}", train, seed=seed, held_out=args.clients - train
    )
    state = None
    for name, build in methods.items():
        if name != "FedABML, 5 steps a batch":  # which differs in fine-tuning alone
            *_, state = pyrofl.federate(
                build(0), data, rounds, seed=seed, participation=pyrofl.participation.fraction(0.5)
            )
        found = []
        for tune in epochs:
            what = {"model": "personal", "adapted": "adapt"} if tune else {"model": "global"}
            scores = pyrofl.evaluate(
                build(tune), data, state, population="held_out", seed=seed, **what
            )
            found.append(scores.mean("accuracy"))
        curves[name].append(found)
        print(f"seed {seed}, {name}: done")

rows = [[name, *(f"{v:.4f}" for v in np.mean(found, 0))] for name, found in curves.items()]
print(table(["epochs of fine-tuning", *map(str, epochs)], rows))
figures.save(figures.after_epochs(epochs, curves), args.out / "new_clients.png")
print(f"figure: {args.out / 'new_clients.png'}")
