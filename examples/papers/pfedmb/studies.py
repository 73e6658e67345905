"""Tables and figures of pFedMB (Mori and others); table I and figure 3 have their own script."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from harness import PARTS, Case, Claim, Entry, Settings, Study, Trial, in_parts
from plots import by_round, compared
from torch import Tensor

import pyrofl
from pyrofl import Federation
from pyrofl.tensors import generator

METRICS = ("after", "before", "validation", "after_quarter")


def parted(rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return training rows of a client, and a fifth of its rows for validation."""
    order = rows[torch.randperm(len(rows), generator=generator(seed))]
    return order[len(rows) // 5 :], order[: len(rows) // 5]


def measure(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies before and after local fine-tuning, and on validation rows after it.

    `after_quarter` is the accuracy after fine-tuning in the first quarter of the rounds (figure 4).
    """
    data = trial.task.data
    train, aside = zip(*(parted(rows, trial.seed) for rows in data.train), strict=True)
    data = replace(data, train=train)
    quarter = trial.fit(data, rounds=max(1, trial.settings.rounds // 4))
    run = trial.fit(data, resume_from=quarter)
    tuned = "fine_tune" if run.method.adapt else "train"  # the local training once more

    def accuracy(of: Federation, of_run: pyrofl.Run, adaptation: str) -> float:
        found = pyrofl.evaluate(run.method, of, of_run.state, adaptation=adaptation)
        return found.mean("accuracy")

    return {
        "validation": accuracy(replace(data, test=aside), run, tuned),
        "before": accuracy(data, run, "none"),
        "after": accuracy(data, run, tuned),
        "after_quarter": accuracy(data, quarter, tuned),
    }


def measure_pairs(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies by round of ten clients in five pairs, after local fine-tuning."""
    data = in_pairs(trial.task.data, trial.seed)
    train, aside = zip(*(parted(rows, trial.seed) for rows in data.train), strict=True)
    data = replace(data, train=train)
    scores: dict[str, float | None] = {}
    for percent, run in in_parts(trial, data):
        how = {"adaptation": "fine_tune" if run.method.adapt else "train"}
        found = pyrofl.evaluate(run.method, data, run.state, **how)
        scores[f"after_{percent}"] = found.mean("accuracy")
    found = pyrofl.evaluate(run.method, replace(data, test=aside), run.state, **how)
    return scores | {"validation": found.mean("accuracy")}


def in_pairs(data: Federation, seed: int) -> Federation:
    """Return ten clients with these rows, of which 2k and 2k + 1 have classes 2k and 2k + 1.

    The two share the training rows of their classes, and each is tested on all their test rows.
    """
    rows, tests = torch.cat([*data.train]), torch.cat([*data.test])
    rows = rows[torch.randperm(len(rows), generator=generator(seed))]
    train = [rows[data.y[rows] // 2 == j // 2][j % 2 :: 2] for j in range(10)]
    test = [tests[data.y[tests] // 2 == j // 2] for j in range(10)]
    return replace(data, train=tuple(train), test=tuple(test))


NAMES = {"Local": "local", "FedAvg": "fedavg", "FedProx": "fedprox", "FedPer": "fedper"}
NAMES |= {"pFedMe": "pfedme", "IFCA": "ifca", "FedFomo": "fedfomo", "FedAMP": "fedamp"}
ROWS = {name: Entry(method) for name, method in NAMES.items()} | {"pFedMB": Entry("pfedmb")}
BRANCHES = (2, 4, 6, 8, 10, 15, 20)
TWO, FRACTIONS = "two classes", {15: "everyone", 50: "0.2"}
PARTITIONS = {
    TWO: ("cifar10", "labels:2"),
    "Dirichlet": ("cifar10", "dirichlet:0.4,min=10"),
    "CIFAR-100": ("cifar100", "shares:20"),
}
PER_CLASS = {"cifar10": 150, "cifar100": 20}
SMALL = {"pixels": 16, "tested": 30, "net": "mlp:50", "rounds": 15}
BEST = {"two classes, 15": 6, "two classes, 50": 10, "Dirichlet, 15": 7, "Dirichlet, 50": 6}
BEST |= {"CIFAR-100, 15": 3, "CIFAR-100, 50": 3}
"""Numbers of branches of the paper's table III."""
WORDS = ("epochs=5", "batch=64", "momentum=0.0", "fine_tune=5")
COLUMNS = {
    f"{name}, {n}": Case(
        {"data": data, "partition": partition, "clients": n, "participation": FRACTIONS[n]}
        | {"words": (*WORDS, f"branches={BEST[f'{name}, {n}']}")},
        {"per_class": PER_CLASS[data]},
    )
    for name, (data, partition) in PARTITIONS.items()
    for n in (15, 50)
}
RATES = (0.02, 0.06, 0.2, 0.6, 2)
WIDE = tuple(f"lr={lr} lr_alpha={10 * lr:g}" for lr in RATES)
GRID = WIDE[:3]
BASE = Settings(data="cifar10", net="cnn-pfedmb", rounds=200, words=WORDS)
COMMON: dict[str, Any] = {
    "base": BASE,
    "small": SMALL,
    "metrics": METRICS,
    "measure": measure,
    "grid": GRID,
    "figure": compared("before", "after"),
}


def above(name: str, case: str, sign: int = 1) -> Claim:
    """Return the claim that pFedMB is above a method, or as accurate."""
    word = "above" if sign else "as accurate as"
    return Claim(f"pFedMB {word} {name}, {case}", "pFedMB", name, case, "after", sign=sign)


PAIRED = ("branches=5", "shared=true")
STUDIES: dict[str, Study] = {
    "figure4": Study(
        title="table I; figure 4",
        about="Ten clients in five pairs, each with two classes, and alpha the same in all layers.",
        base=replace(BASE, clients=10),
        small={**SMALL, "tested": 100, "rounds": 20, "per_class": 150},
        smoke={"per_class": 24},
        entries={
            "Local": Entry("local"),
            "FedAvg": Entry("fedavg"),
            "pFedMB, unweighted": Entry("pfedmb", (*PAIRED, "weighted=false")),
            "pFedMB": Entry("pfedmb", PAIRED),
        },
        metrics=(*(f"after_{percent}" for percent in reversed(PARTS)), "validation"),
        measure=measure_pairs,
        claims=tuple(
            Claim(f"{text} {name}", "pFedMB", name, "", metric, paper=paper)
            for text, metric, paper in (
                ("pFedMB above", "after_100", ""),
                ("after a fifth of the rounds above", "after_20", "figure"),
            )
            for name in ("FedAvg", "pFedMB, unweighted")
        ),
        grid=GRID,
        figure=by_round("after"),
    ),
    "table2": Study(
        title="table II",
        about="Nine methods after local fine-tuning; of each, the best of three learning rates on "
        "validation rows. The rate of pFedMB's alpha is ten times that of its branches, and "
        "FedProx has its default mu of 0.1; the paper states neither.",
        cases=COLUMNS,
        entries=ROWS,
        claims=(
            *(above(name, case) for case in COLUMNS for name in ("Local", "FedAvg")),
            *(above("pFedMe", case) for case in COLUMNS if case != "CIFAR-100, 15"),
            above("pFedMe", "CIFAR-100, 15", sign=0),
            above("FedAMP", "two classes, 15", sign=0),
        ),
        **COMMON,
    ),
    "table3": Study(
        title="figure 5",
        about="Number of branches. At size small with handwritten digits.",
        cases={TWO: Case({"partition": "labels:2", "clients": 50, "participation": "0.2"})},
        entries={f"{b} branches": Entry("pfedmb", (f"branches={b}",)) for b in BRANCHES},
        claims=(
            *(
                Claim(
                    f"ten branches are better than {n}",
                    "10 branches",
                    f"{n} branches",
                    TWO,
                    "after",
                    paper="figure",
                )
                for n in (2, 20)
            ),
        ),
        **COMMON
        | {
            "grid": WIDE,  # more branches need larger rates
            "small": {"data": "digits", "net": "mlp:50", "rounds": 20, "clients": 20},
            "smoke": {"per_class": None, "tested": None},
        },
    ),
}
