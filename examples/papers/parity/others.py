"""Compare the accuracy of pyrofl with reference implementations on the same clients.

The folder of --data contains fashion20.npz and pfedvem_slices100.npz, with the indices of the rows
of ../fashion_mnist.npz of each client. The reference results are of one seed of PFLlib and of the
pFedVEM authors' code. Runs that --out contains are not repeated, so the script can be interrupted.

The reference is one draw, as is each of our n seeds: if both programs are the same, its difference
from our mean has standard error s (1 + 1 / n)^1/2, with s our standard deviation between seeds,
pooled over the rounds of a method's model. `too_far` requires differences within 1.5 points on
average over rounds, and in each round within 1.5 points or three such standard errors, whichever
is larger.

Run: python examples/papers/parity/others.py --data FOLDER [--methods apfl ditto] [--seeds 3]
Without --data it prints the table of the existing results.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import pyrofl
from pyrofl import nets
from pyrofl.data import Batch, Federation
from pyrofl.data.loaders import datasets
from pyrofl.files.text_tables import markdown
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.models import apfl, ditto, fedavg, fedbabu, fedrep, local, perfedavg, pfedme, pfedvem

HERE = Path(__file__).parent
NET = nets.build("mlp:100", (1, 28, 28), 10)
STEPS = {"batch": 10, "epochs": 1, "lr": 0.01, "momentum": 0.0}
COLUMNS = ("method", "seed", "model", "round", "theirs", "ours", "seconds", "commit", "command")
COMMAND = "python examples/papers/parity/others.py --data FOLDER"
SEEDS = 3
WITHIN = 0.015  # largest mean difference over rounds
ERRORS = 3.0  # largest difference of a single round, in standard errors

Line = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A method with the reference settings and results: model -> round -> accuracy."""

    build: Callable[[], Method]
    theirs: Mapping[str, Mapping[int, float]]
    adaptation: str = "none"
    clients: str = "twenty"
    how: Mapping[str, Any] = field(default_factory=dict)  # to fit


def on_ten(method: Method) -> Method:
    """Return the method with adaptation on ten random rows of a client, drawn for every test."""
    (phase,) = method.adapt
    (step,) = phase.updates

    def loss(model: Program, guide: Program, received: Any, local: Any, batch: Batch) -> Tensor:
        order = torch.rand(batch.mask.shape).masked_fill(~batch.mask, 2.0).argsort(1)[:, :10]
        client = torch.arange(len(batch))[:, None]
        few = {n: getattr(batch, n)[client, order] for n in ("x", "y", "mask")}
        return step.loss(model, guide, received, local, replace(batch, at=None, **few))

    return replace(method, adapt=(replace(phase, updates=(replace(step, loss=loss),)),))


CASES = {
    "fedavg": Case(
        lambda: fedavg.build(NET, **STEPS), {"global": {5: 0.597, 10: 0.685, 15: 0.711, 20: 0.721}}
    ),
    "fedrep": Case(
        lambda: fedrep.build(NET, head_epochs=1, **STEPS),
        {"personal": {5: 0.802, 10: 0.850, 15: 0.863, 20: 0.876}},
    ),
    "fedbabu": Case(
        lambda: fedbabu.build(NET, fine_tune=5, **STEPS), {"personal": {20: 0.872}}, "fine_tune"
    ),
    "ditto": Case(
        lambda: ditto.build(NET, strength=0.1, **STEPS),
        {"personal": {5: 0.814, 10: 0.853, 15: 0.870, 20: 0.883}},
    ),
    "pfedme": Case(
        lambda: pfedme.build(NET, strength=5.0, steps=5, lr_center=0.05, beta=1.0, **STEPS),
        {"personal": {5: 0.839, 10: 0.860, 15: 0.872, 20: 0.885}},
    ),
    "perfedavg": Case(
        # PFLlib trains clients twice per round, and tests after a step on ten rows of each.
        lambda: on_ten(perfedavg.build(NET, order="first", inner_lr=0.01, **STEPS | {"epochs": 2})),
        {"personal": {5: 0.754, 10: 0.799, 15: 0.786, 20: 0.821}},
        "fine_tune",
    ),
    "apfl": Case(
        lambda: apfl.build(NET, alpha=0.5, lr_alpha=0.01, **STEPS),
        {"personal": {5: 0.831, 10: 0.866, 15: 0.877, 20: 0.885}},
    ),
    "local": Case(lambda: local.build(NET, **STEPS), {"personal": {10: 0.855}}),
    "pfedvem": Case(
        lambda: pfedvem.build(NET),
        {
            "personal": {1: 0.643, 6: 0.805, 11: 0.831, 16: 0.841, 21: 0.851},
            "global": {1: 0.352, 6: 0.633, 11: 0.714, 16: 0.748, 21: 0.760},
        },
        clients="hundred",
        how={"participation": pyrofl.participation.bernoulli(0.1)},
    ),
}


@cache
def images(folder: Path) -> Any:
    """Return Fashion-MNIST from the parent folder."""
    return datasets.load(f"npz:{folder.parent / 'fashion_mnist.npz'}")


def held(path: Path, *names: str) -> list[list[Tensor]]:
    """Return the rows of each client, split at "NAME_offsets" or "offsets"."""
    with np.load(path) as file:
        found = {n: torch.from_numpy(file[n].astype(np.int64)) for n in file.files}
    ends = [found.get(f"{n}_offsets", found.get("offsets")).tolist() for n in names]
    return [[found[n][a:b] for a, b in pairwise(e)] for n, e in zip(names, ends, strict=True)]


@cache
def twenty(folder: Path) -> Federation:
    """Return the clients of fashion20.npz."""
    whole, (train, test) = images(folder), held(folder / "fashion20.npz", "train", "test")
    return Federation(whole.x, whole.y, tuple(train), tuple(test), classes=whole.classes)


@cache
def hundred(folder: Path) -> Federation:
    """Return the clients of pfedvem_slices100.npz, tested on all rows of their five labels."""
    whole, path = images(folder), folder / "pfedvem_slices100.npz"
    rows, (train,) = whole.is_test.nonzero().flatten(), held(path, "rows")
    with np.load(path) as file:
        owned = torch.from_numpy(file["labels"].astype(np.int64))
    test = [rows[torch.isin(whole.y[rows], own)] for own in owned]
    return Federation(
        whole.x, whole.y, tuple(train), tuple(test), classes=whole.classes, pooled_test=rows
    )


def accuracy(run: pyrofl.Run, case: Case, model: str, data: Federation) -> float:
    """Return the accuracy as in the reference: mean over test rows, or over clients (pFedVEM)."""
    pooled = {"population": "pooled"} if case.clients == "hundred" and model == "global" else {}
    scores = run.evaluate(model=model, adaptation=case.adaptation, **pooled)
    if case.clients == "hundred":
        return scores.mean("accuracy")
    rows = torch.tensor([len(data.test[i]) for i in scores.ids.tolist()])
    return float((scores.values["accuracy"] * rows).sum() / rows.sum())


def measure(name: str, seed: int, folder: Path) -> list[Line]:
    """Return the results of one seed for all models and rounds of the reference."""
    case, run, begun = CASES[name], None, perf_counter()
    data = {"twenty": twenty, "hundred": hundred}[case.clients](folder)
    torch.manual_seed(seed)
    lines = []
    for number in next(iter(case.theirs.values())):
        run = pyrofl.fit(
            case.build(), data, number, seed=seed, resume_from=run, progress=False, **case.how
        )
        for model, theirs in case.theirs.items():
            line = (name, seed, model, number, theirs[number], accuracy(run, case, model, data))
            lines.append(dict(zip(COLUMNS, line, strict=False)))
    seconds = round(perf_counter() - begun, 1)
    made = {"seconds": seconds, "commit": commit(), "command": COMMAND}
    return [line | made for line in lines]


@cache
def commit() -> str:
    """Return the commit of the checkout, or "" if there is none."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()


@dataclass(frozen=True)
class Compared:
    """Accuracies of a model after a round: the reference, and the mean over our seeds."""

    method: str
    model: str
    round: int
    theirs: float
    ours: float
    seeds: int
    error: float  # standard error of our mean; NaN of a single seed

    @property
    def difference(self) -> float:
        """Our mean minus the reference."""
        return self.ours - self.theirs

    @property
    def bound(self) -> float:
        """Largest difference allowed in a single round."""
        both = self.error * (self.seeds + 1) ** 0.5  # the reference is one seed
        return max(WITHIN, ERRORS * both) if self.seeds > 1 else WITHIN


def compared(lines: Sequence[Line]) -> list[Compared]:
    """Return one line for each method, model and round."""
    table = pd.DataFrame(lines).astype({"round": int, "theirs": float, "ours": float})
    rows = []
    for (method, model), part in table.groupby(["method", "model"], sort=False):
        rounds = part.groupby("round").ours
        error = float(np.sqrt(rounds.var().mean() / rounds.size().mean()))
        for number, found in part.groupby("round"):
            theirs, ours = found.theirs.iloc[0], found.ours.mean()
            rows.append(Compared(method, model, number, theirs, ours, len(found), error))
    return rows


def too_far(rows: Sequence[Compared]) -> list[str]:
    """Return messages about methods that differ too much from the reference."""
    found = [
        f"{r.method}, {r.model}, round {r.round}: {r.ours:.3f}, reference {r.theirs:.3f}, "
        f"bound {r.bound:.3f}"
        for r in rows
        if abs(r.difference) > r.bound
    ]
    for key in dict.fromkeys((r.method, r.model) for r in rows):
        mean = float(np.mean([r.difference for r in rows if (r.method, r.model) == key]))
        if abs(mean) > WITHIN:
            found.append(f"{', '.join(key)}: mean difference {mean:+.3f}, bound {WITHIN}")
    return found


def show(path: Path) -> None:
    """Print the table of the page, accuracies in percent."""
    rows = []
    for r in compared(read(path)):
        ours = f"{100 * r.ours:.1f} ± {100 * r.error:.1f}" if r.seeds > 1 else f"{100 * r.ours:.1f}"
        cells = [r.method, r.model, str(r.round), f"{100 * r.theirs:.1f}", ours, str(r.seeds)]
        cells += [f"{100 * r.difference:+.1f}", f"{100 * r.bound:.1f}"]
        rows.append(cells)
    head = ("method", "model", "round", "theirs", "ours", "seeds", "difference", "bound")
    print(markdown(head, rows))


def read(path: Path) -> list[Line]:
    """Return the lines of a CSV file, or an empty list if it does not exist."""
    if not path.is_file():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Run the methods and seeds that are missing in the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="Folder of the partitions.")
    parser.add_argument("--methods", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=HERE / "found.csv")
    args = parser.parse_args()
    if args.data is None:
        return show(args.out)
    torch.set_num_threads(1)
    old = read(args.out)
    done = {(line["method"], int(line["seed"])) for line in old}
    with args.out.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not old:
            table.writeheader()
        for seed in range(args.seeds):
            for name in args.methods:
                if (name, seed) not in done:
                    lines = measure(name, seed, args.data)
                    table.writerows(one | {"ours": round(one["ours"], 5)} for one in lines)
                    file.flush()
                    print(name, seed, f"{lines[0]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
