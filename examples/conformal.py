"""Measure the coverage of conformal prediction sets at twenty clients, for all methods.

The clients have different classes and numbers of rows. Half of the test rows of each client
calibrate its sets, the other half measure their coverage. For comparison, sets of the same kind are
built from the probabilities of the models, without calibration.

Run: python examples/conformal.py [--data npz:fashion_mnist.npz] [--quick] [--only NAMES]
[--table FILE.csv] [--out FOLDER]
"""

import argparse
import csv
from importlib import import_module
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from scipy.stats import betabinom

import pyrofl
from pyrofl import datasets, federations, figures, models, nets
from pyrofl.inference.conformal.scores import aps_scores

ALPHA, ROUNDS = 0.1, 10
COLUMNS = (
    *("method", "model", "clients", "calibration_rows", "coverage", "error", "lowest", "highest"),
    *("in_range", "p", "size", "pooled", "pooled_lowest", "uncalibrated", "uncalibrated_lowest"),
    "seconds",
)
SETTINGS = {  # fewer steps of the slowest methods
    "fedabml": {"steps": 1, "num_particles": 1},
    "pfedbayes": {"epochs": 1, "num_particles": 1},
    "pfedme": {"epochs": 2},
}


def smallest_p(lines):
    """Return the smallest p value of the clients' coverage, corrected by Bonferroni."""
    ps = []
    for n, tested, coverage in lines[["calibration_rows", "test_rows", "coverage"]].to_numpy():
        rank = np.ceil((1 - ALPHA) * (n + 1) - 1e-9)
        law = betabinom(tested, rank, n + 1 - rank)
        hits = round(coverage * tested)
        ps.append(2 * min(law.cdf(hits), law.sf(hits - 1)))
    return min(1.0, len(ps) * min(ps))


def uncalibrated(found):
    """Return the coverage by client of sets with the model's own probability 1 - alpha."""
    run, held = found.run, []
    for rows, name in zip(run.data.test, run.data.names, strict=True):
        probs = run.predict(run.data.x[rows], name).mean
        u = torch.rand(len(rows), generator=torch.Generator().manual_seed(0))
        sets = aps_scores(probs, u) <= 1 - ALPHA
        held.append(float(sets.gather(1, run.data.y[rows][:, None]).double().mean()))
    return np.array(held)


def measured(name, run, seconds):
    """Return the row of a method, and its table by client."""
    found = pyrofl.conformal(run, ALPHA)
    table = found.frame()
    own, pooled = (table[table["pooling"] == kind] for kind in ("client", "pooled"))
    plain = uncalibrated(found)
    rows = own["calibration_rows"]
    # Variance of one client's coverage: of its calibration rows, and of its test rows.
    error = (ALPHA * (1 - ALPHA) * (1 / (rows + 2) + 1 / own["test_rows"])).sum() ** 0.5 / len(own)
    inside = own["coverage"].between(own["low"], own["high"]).sum()
    spread = (own["coverage"].min(), own["coverage"].max())
    numbers = (rows.mean(), own["coverage"].mean(), error, *spread)
    others = (pooled["coverage"].mean(), pooled["coverage"].min(), plain.mean(), plain.min())
    line = (name, found.how.model, len(own), *numbers, int(inside), smallest_p(own))
    return (*line, own["size"].mean(), *others, seconds), table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="Short run with two methods.")
    parser.add_argument("--data", default="digits", help="Data set with classes.")
    parser.add_argument("--only", default="", help="Methods, such as pvi,fedavg (default: all).")
    parser.add_argument("--table", type=Path, help="Table (default: coverage.csv in --out).")
    parser.add_argument("--out", type=Path, default=Path("results/conformal"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in models.NAMES if hasattr(import_module(f"pyrofl.models.{n}"), "build")]
    chosen = args.only.split(",") if args.only else ["fedavg", "pfedvem"] if args.quick else names
    dataset = datasets.load(args.data)
    if args.data == "digits":  # few rows: all clients test all rows of their five classes
        policy = ("slices:5", "same_classes")
    else:
        dataset, policy = datasets.per_class(dataset, 300), ("dirichlet:0.3,min=10", "same_shares")
    data = federations.split(dataset, policy[0], clients=20, test=policy[1], server_data=0.1)
    net = nets.build("mlp:50", data.x.shape[1:], len(data.classes))
    settings = SETTINGS | {n: {"server_data": data.server_data} for n in ("fedbe", "predbayes")}
    lines = []
    for name in chosen:
        began = perf_counter()
        method = getattr(models, name).build(net, **settings.get(name, {}))
        run = pyrofl.fit(method, data, 1 if args.quick else ROUNDS, progress=False)
        line, table = measured(name, run, round(perf_counter() - began, 1))
        lines.append([f"{v:.4g}" if isinstance(v, float) else v for v in line])
        print(*lines[-1], flush=True)
        figures.save(figures.coverage_by_client(table), args.out / f"{name}.png")
    path = args.table or args.out / "coverage.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])
    print(f"{path} has the coverage of {len(lines)} methods; {args.out} has a figure for each")
