"""Reproduce pFedMB's figure 3 and table I: find five pairs among ten clients.

Pair k has the classes 2k and 2k+1, with 50 rows per client. For every method, one of three learning
rates is chosen by the accuracy on validation rows and tested before and after local fine-tuning.

Run: python examples/pfedmb_pairs.py [--data npz:PATH] [--quick] [--full] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from papers import files, plots

import pyrofl
from pyrofl import datasets, figures, nets
from pyrofl.models import fedavg, local, pfedmb

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument(
    "--full", action="store_true", help="Use the network of the paper and all rows."
)
parser.add_argument("--data", default="digits", help="Data set with ten classes.")
parser.add_argument("--out", type=Path, default=Path("results/pfedmb_pairs"))
args = parser.parse_args()
print("A full run takes about half an hour on one core; --quick takes seconds.", flush=True)
rounds, seeds, rates = (2, 1, (0.1,)) if args.quick else (20, 3, (0.03, 0.1, 0.3))
each, spec = (50, "mlp:50")
if args.full:
    rounds, each, spec = 200, 4000, "cnn-pfedmb"

dataset = datasets.load(args.data)
if not args.full:
    dataset = datasets.per_class(dataset, 12 * each)  # rows of two clients, and 500 validation rows
net = nets.build(spec, tuple(dataset.x.shape[1:]), outputs=10)
PAIR = torch.arange(10) // 2
SAME = PAIR[:, None] == PAIR  # 20 entries, half of them on the diagonal


def methods(rate: float) -> dict[str, pyrofl.Method]:
    """Return all methods with one learning rate, without momentum as in the paper."""
    plain = {"batch": 64, "lr": rate, "momentum": 0.0}
    mixed = {"shared": True, "lr": rate, "lr_alpha": 10 * rate}
    return {
        "FedAvg": fedavg.build(net, fine_tune=5, **plain),
        "Local": local.build(net, **plain),
        "5 branches": pfedmb.build(net, **mixed),
        "5 branches, unweighted": pfedmb.build(net, weighted=False, **mixed),
        **{f"{b} branches": pfedmb.build(net, branches=b, **mixed) for b in (2, 8, 1)},
    }


def split_pairs(seed: int) -> tuple[pyrofl.Federation, ...]:
    """Return the clients with validation rows, and the same clients with test rows."""
    order = torch.randperm(len(dataset.y), generator=torch.Generator().manual_seed(seed))
    groups = [order[dataset.y[order] // 2 == pair] for pair in PAIR]
    own = [rows[~dataset.is_test[rows]][j % 2 :: 2] for j, rows in enumerate(groups)]
    train, rest = zip(*((rows[:each], rows[each : each + 500]) for rows in own), strict=True)
    tuning = pyrofl.Federation(dataset.x, dataset.y, train, rest, classes=dataset.classes)
    return tuning, replace(tuning, test=tuple(rows[dataset.is_test[rows]] for rows in groups))


def run(name: str, rate: float, seed: int) -> tuple[list[float | None], torch.Tensor]:
    """Return accuracies, distances of alpha, number of branches used, and alpha per round."""
    (tuning, data), method = split_pairs(seed), methods(rate)[name]
    tuned = "fine_tune" if method.adapt else "train"  # the local training once more
    branches = int(name[0]) if "branches" in name else 1
    alpha = [torch.full((10, branches), 1 / branches)]
    for state in pyrofl.federate(method, data, rounds, seed=seed):
        if "branches" in name:
            alpha.append(pyrofl.posterior(method, data, state, draws=1)["alpha"][0, :, 0])
    cases = ((tuning, tuned), (data, "none"), (data, tuned))
    scores = [pyrofl.evaluate(method, d, state, adaptation=a).mean("accuracy") for d, a in cases]
    apart = torch.cdist(alpha[-1], alpha[-1])
    about = [float(apart[SAME].sum() / 10), float(apart[~SAME].mean())]
    about.append(len(alpha[-1].argmax(1).unique()))
    return [*scores, *(about if branches > 1 else [None] * 3)], torch.stack(alpha)


HEAD = ("rows", "rounds", "method", "rate", "seed")
HEAD += ("tuning", "before", "after", "within", "between", "used")
runs = [(each, rounds, n, r, s) for n in methods(rates[0]) for r in rates for s in range(seeds)]
about = {"data": dataset.name, "net": spec}
lines = files.fill(args.out / "pairs.csv", HEAD, runs, lambda *of: [run(*of[2:])[0]], **about)
best = files.best(lines, "tuning", over="rate")
print(files.means(best, {"before": 100, "after": 100, "within": 1, "between": 1, "used": 1}))
history = {
    name: run(name, float(of[0]["rate"]), 0)[1] for name, of in best.items() if name.startswith("5")
}
panels = [f"classes {2 * k} and {2 * k + 1}" for k in PAIR.tolist()]
figures.save(plots.alphas(history, panels), args.out / "alphas.png")
print(f"Results saved to {args.out}: pairs.csv, alphas.png")
