"""Plot reliability diagrams of FedAvg and four posteriors, with tuned settings.

Settings, partition, network and participation are those of `examples/tuned.py`; predictions are
those of the posterior's mean, or averaged over posterior draws. The bins are written to
reliability.csv.

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
from pyrofl.figures.style import COLOURS, panels
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
    server=0.1,
)
net = nets.build("mlp:50", data.x.shape[1:], len(data.classes))
some = pyrofl.participation.fraction(0.2)
lines, bins = [], {}
for method, model in MODELS.items():
    settings = chosen(method)
    built = import_module(f"pyrofl.models.{method}").build(net, **read(settings))
    draws = None if method == "fedavg" else args.draws
    found = []
    for seed in range(seeds):
        run = pyrofl.fit(built, data, rounds, participation=some, seed=seed, progress=False)
        found.append(run.calibration(model=model, draws=draws))
        lines += [
            (method, model, settings, seed, i, int(n), f"{sure:.4f}", f"{right:.4f}")
            for i, (n, sure, right) in enumerate(zip(*found[-1], strict=True))
        ]
    count = torch.stack([one.rows for one in found]).sum(0)
    parts = [
        sum(torch.nan_to_num(getattr(one, n)) * one.rows for one in found) / count.clamp(min=1)
        for n in ("confidence", "accuracy")
    ]
    bins[method] = Bins(count, *parts)
    ece, *_ = calibration_error(bins[method])
    right = float((count * parts[1]).sum() / count.sum())
    print(f"{method} ({model}): accuracy {right:.3f}, ECE over all test rows {ece:.3f}", flush=True)

args.out.mkdir(parents=True, exist_ok=True)
with (args.out / "reliability.csv").open("w", newline="") as file:
    csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
figure, axes = panels(len(bins), len(bins), 2.5, 3.1, (0.3, 0.1))
for axis, (method, one) in zip(axes, bins.items(), strict=True):
    seen = one.rows > 0
    axis.plot([0, 1], [0, 1], color="#999999", linewidth=1)
    size = 200 * one.rows[seen] / one.rows.max()
    axis.plot(one.confidence[seen], one.accuracy[seen], color=COLOURS[0])
    axis.scatter(one.confidence[seen], one.accuracy[seen], s=size, color=COLOURS[0])
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", aspect="equal")
    axis.set_title(f"{method}, {MODELS[method]} model\nECE {float(calibration_error(one)[0]):.3f}")
axes[0].set_ylabel("fraction of correct predictions")
figures.save(figure, args.out / "reliability.png")
print(f"table and figure: {args.out / 'reliability.csv'}, {args.out / 'reliability.png'}")
