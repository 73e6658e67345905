"""Compare accuracy and calibration of X and X+MetaVD on training and held-out clients.

Twenty clients train and six are held out. A held-out client gets the mean embedding and one step
on its own rows (none for FedAvg). All methods have the same network. For random weights,
predictions use the mean of the weights, or average ten draws. Test rows have the class
distribution of the client (same_shares), or are partitioned independently as in the authors' code
(independent).

Run: python examples/metavd_held_out.py [--data npz:fashion_mnist.npz] [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.files.text_tables import table
from pyrofl.metrics import Bins, calibration_error
from pyrofl.models import metavd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--data", default="digits", help="Data set with classes.")
parser.add_argument(
    "--per-class", type=int, default=100, help="Training rows per class, over all clients."
)
parser.add_argument("--partition", default="dirichlet:0.1,min=10")
parser.add_argument("--test", default="same_shares", help="Test split: same_shares or independent.")
parser.add_argument("--rounds", type=int, default=60)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=Path("results/metavd_held_out"))
parser.add_argument(
    "--hyper-lr",
    type=float,
    default=0.9,
    help="Learning rate of the hypernetwork (default: that of the authors' code).",
)
args = parser.parse_args()
rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)

# X+MetaVD uses the learning rate of X; with exact Hessians PerFedAvg needs a small one.
RATES = {"fedavg": 0.03, "reptile": 0.03, "maml": 0.03, "perfedavg": 0.005}
DREW = "reptile"  # the method of the reliability figure

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
net = nets.build("mlp:100,50", tuple(dataset.x.shape[1:]), len(dataset.classes))


def fit(on: str, dropout: str, seed: int) -> dict[tuple[str, str], Bins]:
    """Return reliability bins of training and held-out clients, after training.

    Keys are the population and "mean" or "draws".
    """
    data = federations.split(
        dataset, args.partition, clients=20, held_out=6, seed=seed, test=args.test
    )

    def at(number: int) -> pyrofl.Method:
        own = {"on": on, "dropout": dropout, "lr": RATES[on], "hyper_lr": args.hyper_lr}
        return metavd.build(net, **own, elapsed=number / rounds)

    run = pyrofl.fit(
        at, data, rounds, seed=seed, participation=pyrofl.participation.fixed(10), progress=False
    )
    adaptation = "fine_tune" if run.method.adapt else "none"
    for note in run.warnings:
        print(f"{on}+{dropout}, seed {seed}: {note}")
    return {
        (population, by): run.calibration(population=population, adaptation=adaptation, draws=draws)
        for population in ("training", "held_out")
        for by, draws in {"mean": None, **({} if dropout == "none" else {"draws": 10})}.items()
    }


def score(found: list[Bins]) -> list[str]:
    """Return accuracy and ECE, in percent, as means over seeds."""
    right = [float((b.accuracy.nan_to_num() * b.rows).sum() / b.rows.sum()) for b in found]
    ece = [float(calibration_error(b)[0]) for b in found]
    return [f"{100 * sum(values) / len(values):.1f}" for values in (right, ece)]


rows, drawn = [], {}
for on in RATES:
    variants = {"none": on, "meta": f"{on}+MetaVD"}
    if on == DREW and not args.quick:
        variants |= {"vd": f"{on}+VD", "ensemble": f"{on}+EnsembleVD"}
    for dropout, name in variants.items():
        found = [fit(on, dropout, seed) for seed in range(seeds)]
        for by in ("mean", "draws") if dropout != "none" else ("mean",):
            rows.append([name, by])
            for population in ("training", "held_out"):
                rows[-1] += score([f[population, by] for f in found])
        if on == DREW:
            drawn[name] = found[0]["held_out", by]
        print(f"{name}: done")

print(table(["method", "by", "accuracy %", "ECE %", "held-out accuracy %", "held-out ECE %"], rows))
figures.save(figures.reliability(drawn), args.out / "reliability.png")
print(f"figure: {args.out / 'reliability.png'}")
