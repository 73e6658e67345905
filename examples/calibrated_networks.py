"""Measure how well the posteriors of networks are calibrated, for all methods with a posterior.

First part, simulated truth: labels of handwritten digits are drawn from networks whose weights are
draws of the prior, so the true probability of a class is known. The table has the fraction of test
rows whose 95% interval contains it. Second part, real labels: scores of predictions for digits 0
to 4 at ten clients, and the AUROC of the entropy as a detector of digits 5 to 9.

Run: python examples/calibrated_networks.py [--quick] [--only NAMES] [--out FOLDER]
"""

import argparse
import csv
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import pyrofl
from pyrofl import checks, datasets, federations, figures, nets
from pyrofl.figures.many import rows
from pyrofl.figures.style import COLORS, panels
from pyrofl.inference.evaluation.predict import answers, probabilities
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.tensors import generator

COLUMNS = (
    *("method", "coverage", "coverage_error", "width", "accuracy", "nll", "ece", "auroc"),
    *("fits", "rounds", "seconds"),
)
METHODS = "fedavg pvi fedgvi fedlap fedivon ivonadmm fedep fisher fola fald fedpa fedbe virtual "
METHODS += (
    "fedhb amortized fedwba pfedvem pfedbayes lrbpfl fedabml fedpop pfedgp pfedmb metavd predbayes"
)
SETTINGS = {  # fewer steps of the slowest methods
    "fedabml": {"steps": 1, "num_particles": 1},
    "pfedbayes": {"epochs": 1, "num_particles": 1},
}
HIDDEN, CLASSES, DRAWS, ROUNDS = 16, 3, 100, 20

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two methods.")
parser.add_argument("--only", default="", help="Methods, such as pvi,fedavg (default: all).")
parser.add_argument("--fits", type=int, default=5, help="Simulated truths; and seeds, at most 3.")
parser.add_argument("--out", type=Path, default=Path("results/calibrated_networks"))
args = parser.parse_args()
print("A full run takes about an hour on one core; --quick takes seconds.", flush=True)
torch.set_num_threads(1)
fits, rounds = (1, 1) if args.quick else (args.fits, ROUNDS)
digits = datasets.load("digits")


def simulated(seed):
    """Return a federation with simulated labels, its network, and the true probabilities."""
    net = nets.build(f"mlp:{HIDDEN}", (64,), CLASSES)
    x = digits.x / digits.x.std() / 8  # the hidden units' inputs have about unit variance
    source = generator("truth", seed)
    w = {n: torch.randn(1, 1, *shape, generator=source) for n, shape in net.shapes.items()}
    probs = net(w, x[None])[0].softmax(-1)
    y = torch.multinomial(probs, 1, generator=source)[:, 0]
    some = replace(digits, x=x, y=y, classes=tuple("abc"))
    return federations.split(some, "dirichlet:1,min=10", 10, seed=seed), net, probs


def asked(method):
    """Return which predictions are tested: of the ensemble if there is one, else of draws."""
    adapts = method.adapt and method.main_view == "personal"
    one = {"model": "ensemble"} if "ensemble" in method.views else {"draws": DRAWS}
    return one | {"adaptation": "fine_tune" if adapts else "none"}


def intervals(method, data, state):
    """Return 95% intervals of the test rows' class probabilities: client -> [rows, 2, classes]."""
    how = EvaluationSpec.of({"draws": None} | asked(method), excluded=("part",))
    ends = torch.tensor([0.025, 0.975])

    def read(members, batch, noise):
        """Return mean probabilities, a placeholder density, and the intervals."""
        shape = (how.draws or 1, *batch.mask.shape, -1)
        probs = torch.cat([probabilities(fn).expand(shape) for fn in members])
        found = probs.quantile(ends, dim=0).movedim(0, -2)
        return probs.mean(0), found.new_zeros(batch.mask.shape), found

    return {
        i: values[seen]
        for some, _, _, found, _, mask in answers(method, data, state, how, read, ("the data", 0))
        for i, values, seen in zip(some.tolist(), found, mask, strict=True)
    }


def coverage(method, data, state, probs):
    """Return how many intervals of the test rows contain the true probability, and their width."""
    held, widths = [], []
    for j, found in intervals(method, data, state).items():
        truth = probs[data.test[j]]
        held.append(((found[:, 0] <= truth) & (truth <= found[:, 1])).double())
        widths.append(found[:, 1] - found[:, 0])
    return float(torch.cat(held).mean()), float(torch.cat(widths).mean())


def scores(method, data, run, unknown):
    """Return accuracy, NLL, ECE and AUROC of predictions that are averaged over draws."""
    how = {"draws": None} | asked(method)
    table = run.evaluate(**how)
    mine = checks.uncertainty(method, data, run.state, **how)
    other = checks.uncertainty(method, data, run.state, unknown, **how)
    auroc = float(mine.told_apart(other, "total").mean())
    return (*(table.mean(n) for n in ("accuracy", "nll", "ece")), auroc)


def build(name, net, data):
    """Return a method with its default settings."""
    settings = SETTINGS.get(name, {})
    if name in ("fedbe", "predbayes"):
        settings = settings | {"server_data": data.server_data}
    return import_module(f"pyrofl.models.{name}").build(net, **settings)


def row(name):
    """Return the row of a method."""
    begun, shares, widths, points = perf_counter(), [], [], []
    for seed in range(fits):
        data, net, probs = simulated(seed)
        data = replace(data, server_data=data.x[:50])
        method = build(name, net, data)
        run = pyrofl.fit(method, data, rounds, seed=seed, progress=False)
        share, width = coverage(method, data, run.state, probs)
        shares.append(share)
        widths.append(width)
    known = digits.y < 5
    inside = replace(digits, x=digits.x[known], y=digits.y[known], is_test=digits.is_test[known])
    inside = replace(inside, classes=digits.classes[:5])
    for seed in range(min(fits, 3)):
        data = federations.split(inside, "labels:3", 10, seed=seed, server_data=0.1)
        method = build(name, nets.build("mlp:50", (64,), 5), data)
        run = pyrofl.fit(method, data, rounds, seed=seed, progress=False)
        points.append(scores(method, data, run, digits.x[~known]))
    error = np.std(shares, ddof=1) / len(shares) ** 0.5 if len(shares) > 1 else np.nan
    numbers = [np.mean(shares), error, np.mean(widths), *np.mean(points, 0)]
    cells = ["" if np.isnan(v) else f"{v:.4f}" for v in numbers]
    return [name, *cells, fits, rounds, f"{perf_counter() - begun:.0f}"]


args.out.mkdir(parents=True, exist_ok=True)
path = args.out / "calibrated_networks.csv"
lines = {}
if path.exists():  # keep the rows of other methods
    with path.open(newline="") as file:
        lines = {line[0]: line for line in list(csv.reader(file))[1:]}
quick = ["fedavg", "fisher"] if args.quick else METHODS.split()
for name in args.only.split(",") if args.only else quick:
    lines[name] = row(name)
    print(*lines[name], flush=True)
    with path.open("w", newline="") as file:
        order = [n for n in METHODS.split() if n in lines]
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *(lines[n] for n in order)])
shown = {name: line for name, line in lines.items() if float(line[3]) > 0}  # not point estimates
figure, (axes,) = panels(1, 1, 6.4, 1.2 + 0.25 * len(shown))
found = [[100 * float(v or 0) for v in line[1:3]] for line in shown.values()]
places = rows([share for share, _ in found])
for at, i in zip(places.at, places.order, strict=True):
    share, error = found[i]
    axes.errorbar(share, at, xerr=error, fmt="o", color=COLORS[0])
axes.axvline(95, color="#999999", linewidth=1)
places.label(axes, list(shown), "coverage", " methods")
axes.set(xlim=(0, 101), xlabel="true probabilities within their 95% intervals (%), standard error")
figures.save(figure, args.out / "calibrated_networks.png")
print(f"table and figure: {path}, {args.out / 'calibrated_networks.png'}")
