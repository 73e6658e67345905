"""What every method reaches in three short rounds; a change that moves one shows here.

Handwritten digits in double precision, ten clients, defaults. On one machine the numbers come again
to the last bit. Other machines and releases of torch add up in another order; where rows are moved
by 1e-15 of themselves, which does as much, NLLs move by 4e-16 at most, FedHB's by 2e-8.

Run, after a change that is meant: python tests/golden/released.py [METHOD ...]
"""

from __future__ import annotations

import csv
import inspect
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

import pyrofl
from pyrofl import nets
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.experiments.methods import builds
from pyrofl.partitions import federations

PATH = Path(__file__).parent / "released.csv"
SEEDS = (0, 1)
ROUNDS = 3
WITHIN = 1e-6  # of log likelihoods, in nats per row; accuracies are to be equal

Scores = dict[tuple[str, int], tuple[float, float]]
"""(method, seed) -> accuracy and NLL, means over clients."""


@cache
def clients() -> Federation:
    """Return the partition, with rows for methods that want some without labels."""
    digits = datasets.per_class(datasets.load("digits"), 40)
    digits = replace(digits, x=digits.x.double())
    return federations.split(digits, "dirichlet:0.5,min=10", 10, seed=0, server_data=0.1)


def measure(name: str, seed: int) -> tuple[float, float]:
    """Return accuracy and NLL of a method's main model, adaptation if it adapts."""
    data, build = clients(), builds()[name]
    wanted = inspect.signature(build).parameters
    own = {"server_data": data.server_data} if "server_data" in wanted else {}
    method = build(nets.build("mlp:16", (64,), 10), **own)
    run = pyrofl.fit(method, data, ROUNDS, seed=seed, progress=False)
    adaptation = "fine_tune" if method.adapt and method.main_view == "personal" else "none"
    scores = run.evaluate(adaptation=adaptation)
    return scores.mean("accuracy"), scores.mean("nll")


def kept() -> Scores:
    """Return what the file says."""
    with PATH.open() as file:
        return {
            (line["method"], int(line["seed"])): (float(line["accuracy"]), float(line["nll"]))
            for line in csv.DictReader(file)
        }


def moved(found: Scores, before: Scores) -> list[str]:
    """Say which methods are elsewhere than before, one line each."""
    lines = []
    for (name, seed), now in sorted(found.items()):
        then = before.get((name, seed))
        if then is None:
            lines.append(f"{name}, seed {seed}: new")
        elif not all(abs(a - b) <= WITHIN for a, b in zip(now, then, strict=True)):
            (accuracy, nll), (old_accuracy, old_nll) = now, then
            lines.append(
                f"{name}, seed {seed}: accuracy {old_accuracy:.4f} -> {accuracy:.4f}, "
                f"NLL {old_nll:.8g} -> {nll:.8g}, more than {WITHIN:g} apart"
            )
    return lines


def main(names: list[str]) -> None:
    """Write the file anew, or the lines of some methods."""
    torch.set_num_threads(1)
    before = kept() if PATH.is_file() else {}
    found = {}
    for name in names or builds():
        for seed in SEEDS:
            found[name, seed] = measure(name, seed)
        print(name, *found[name, SEEDS[-1]], flush=True)
    print(*moved(found, before), sep="\n")
    after = {k: v for k, v in before.items() if k[0] in builds()} | found
    with PATH.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("method", "seed", "accuracy", "nll"))
        table.writerows((*k, *map(repr, v)) for k, v in sorted(after.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
