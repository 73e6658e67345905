"""What every method reaches at its defaults on fixed clients; what a release changes shows here.

Run, after a change that is meant: python tests/parity/released.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import pyrofl
from pyrofl import nets
from pyrofl.cli.methods import builds
from pyrofl.data import datasets
from pyrofl.partitions import federations

PATH = Path(__file__).parent / "released.json"
SEEDS = (0, 1)
ROUNDS = 5


def methods() -> list[str]:
    """Return the names of all methods."""
    return sorted(builds())


def accuracy(name: str, seed: int) -> float:
    """Return a method's accuracy on handwritten digits, over all clients' test rows alike."""
    data = federations.split(
        datasets.load("digits"), "dirichlet:0.5,min=10", 10, seed=seed, server=0.1
    )
    own = {"unlabelled": data.unlabelled} if name == "fedbe" else {}
    method = builds()[name](nets.build("mlp:50", (64,), 10), **own)
    run = pyrofl.fit(method, data, ROUNDS, seed=seed, progress=False)
    personal = run.method.main_view == "personal"
    scores = run.evaluate(adapted="adapt" if run.method.adapt and personal else "none")
    rows = torch.tensor([len(data.test[i]) for i in scores.ids.tolist()])
    return float((scores.values["accuracy"] * rows).sum() / rows.sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = []
    for name in methods():
        lines.append(f' "{name}": {[round(accuracy(name, seed), 4) for seed in SEEDS]}')
        print(lines[-1], flush=True)
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
