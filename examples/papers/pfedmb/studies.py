"""Tables and figures of pFedMB (Mori and others); table I and figure 3 have their own script."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from harness import Case, Claim, Entry, Settings, Study, Trial
from plots import compared
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
CASE = "CIFAR-100, 15"
STUDIES: dict[str, Study] = {
    "table2": Study(
        title="table II; figure 4 (accuracy in early rounds)",
        about="Nine methods after local fine-tuning; of each, the best of three learning rates on "
        "validation rows. The rate of pFedMB's alpha is ten times that of its branches, and "
        "FedProx has its default mu of 0.1; the paper states neither.",
        cases=COLUMNS,
        entries=ROWS,
        claims=(
            *(
                Claim(f"pFedMB above {name}, {case}", "pFedMB", name, case, "after")
                for case in (CASE, "CIFAR-100, 50", "two classes, 50", "Dirichlet, 50")
                for name in ("FedAvg", "pFedMe")
            ),
            Claim(
                "pFedMB is ahead of FedAvg in early rounds (figure 4)",
                "pFedMB",
                "FedAvg",
                CASE,
                "after_quarter",
                paper="figure",
            ),
        ),
        **COMMON,
    ),
    "table3": Study(
        title="table III; figure 5",
        about="Number of branches; table III has the best of each column. Here with 50 clients of "
        "two classes.",
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
