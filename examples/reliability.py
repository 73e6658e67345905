"""Plot reliability diagrams of FedAvg and four posteriors, with tuned settings.

Settings, partition, network and participation are those of `examples/tuned.py`; predictions are
those of the posterior's mean, or averaged over posterior draws. The bins are written to
reliability.csv, and --draw plots those of such a file.

Run: python examples/reliability.py [--data npz:fashion_mnist.npz] [--quick] [--out FOLDER]
"""

import argparse
import csv
from ast import literal_eval
from importlib import import_module
from pathlib import Path

import torch

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.metrics import Bins, calibration_error

TUNED = Path(__file__).parent / "papers/tuned/budget.csv"
MODELS = {  # method -> tested model
    "fedavg": "global",
    "pvi": "global",
    "fedivon": "global",
    "fedlap": "global",
    "pfedvem": "personal",
}
COLUMNS = ("method", "model", "settings", "seed", "bin", "rows", "confidence", "accuracy")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="digits", help="Data set with classes.")
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--seeds", type=int, default=3, help="Number of seeds.")
parser.add_argument("--draws", type=int, help="Posterior draws (default: use the mean).")
parser.add_argument("--out", type=Path, default=Path("results/reliability"))
parser.add_argument(
    "--draw", action="store_true", help="Plot reliability.csv of --out; run nothing."
)
args = parser.parse_args()
torch.set_num_threads(1)
rounds, seeds = (2, 1) if args.quick else (18, args.seeds)
clients, count = (10, 20) if args.quick else (100, 300)


def chosen(method):
    """Return the settings of a method in budget.csv as text."""
    with TUNED.open(newline="") as file:
        found = {line["method"]: line["chosen"] for line in csv.DictReader(file)}
    return found.get(method, "").replace("defaults", "")


def read(text):
    """Return settings as keyword arguments, from text such as "lr=0.1 damping=none"."""
    pairs = (part.split("=", 1) for part in text.split() if "=" in part)
    words = {"none": None, "true": True, "false": False}

    def value(word):
        try:
            return literal_eval(word)
        except ValueError:
            return words.get(word, word)

    return {name: value(word) for name, word in pairs}


data = federations.split(
    datasets.per_class(datasets.load(args.data), count),
    "dirichlet:0.3,min=10" if not args.quick else "iid",
    clients,
    seed=0,
    server_data=0.1,
)
net = nets.build("mlp:50", data.x.shape[1:], len(data.classes))
some = pyrofl.participation.fraction(0.2)
table, lines = args.out / "reliability.csv", []
for method, model in MODELS.items() if not args.draw else ():
    settings = chosen(method)
    built = import_module(f"pyrofl.models.{method}").build(net, **read(settings))
    draws = None if method == "fedavg" else args.draws
    for seed in range(seeds):
        run = pyrofl.fit(built, data, rounds, participation=some, seed=seed, progress=False)
        found = run.calibration(model=model, draws=draws)
        lines += [
            (method, model, settings, str(seed), str(i), f"{n:.0f}", f"{sure:.4f}", f"{right:.4f}")
            for i, (n, sure, right) in enumerate(zip(*found, strict=True))
        ]

if args.draw:
    with table.open(newline="") as file:
        lines = [tuple(line) for line in csv.reader(file)][1:]
else:
    args.out.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
bins = {}
for method, model in MODELS.items():
    mine = torch.tensor([[float(v) for v in line[4:]] for line in lines if line[0] == method])
    each = mine.reshape(-1, int(mine[:, 0].max()) + 1, 4)  # [seeds, bins, columns]
    rows = each[..., 1].sum(0)
    sure, right = ((each[..., k].nan_to_num() * each[..., 1]).sum(0) / rows for k in (2, 3))
    one = Bins(rows, sure, right)
    ece = float(calibration_error(one)[0])
    bins[f"{method}, {model} model: ECE {ece:.3f}"] = one
    mean = float((rows * right.nan_to_num()).sum() / rows.sum())
    print(f"{method} ({model}): accuracy {mean:.3f}, ECE over all test rows {ece:.3f}")
figures.save(figures.reliability(bins), args.out / "reliability.png")
print(f"table and figure: {table}, {args.out / 'reliability.png'}")
