"""Tables and figures of FedBE (Chen and Chao, ICLR 2021); figures 1 and 9 have own scripts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness import PARTS, Case, Claim, Entry, Settings, Study, Trial, in_parts
from plots import by_round, compared

from pyrofl.inference.definition.averages import average
from pyrofl.models.shared.distillation import predictions
from pyrofl.tensors import role

METRICS = ("global", "average", "ensemble")


def measure(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies of the global model, the clients' average, and the teachers' ensemble."""
    run = trial.fit()
    scores: dict[str, float | None] = {
        view: run.evaluate(model=view, population="pooled").mean("accuracy")
        for view in ("global", "ensemble")
        if view in run.method.views
    }
    if trial.method == "fedbe":
        weights = average(role("w", run.state.message), run.state.reporters.size)
        rows = run.data.pooled_test
        probs = predictions(
            trial.task.net, {n: w[None] for n, w in weights.items()}, run.data.x[rows]
        )
        scores["average"] = float((probs[0].argmax(-1) == run.data.y[rows]).double().mean())
    return scores


def measure_by_round(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies of the global model and of the teachers' ensemble by round."""
    return {
        f"{view}_{percent}": run.evaluate(model=view, population="pooled").mean("accuracy")
        for percent, run in in_parts(trial)
        for view in ("global", "ensemble")
    }


NAMED, TWICE = ("v-Distillation", "FedBE"), ("FedAvg", "FedAvg")
PAPER = ("distil_lr=0.001", "distil_lr_end=0.0004")
FEDBE = Entry("fedbe", paper=PAPER)
TEACHERS = {"A": "A", "S": "S", "S+A": "SA", "A+C": "AC", "S+C": "SC", "S+A+C": "SAC"}


def variant(*words: str, **changes: Any) -> Entry:
    """Return FedBE with other settings."""
    return Entry("fedbe", words, paper=PAPER, changes=changes)


BASE = Settings(
    data="cifar10",
    partition="step:2,minor=10",
    clients=10,
    server_data=10_000,
    test="same_classes",
    net="cnn-fedbe",
    rounds=40,
    words=("epochs=20", "batch=40", "lr=0.01", "weight_decay=0.001", "decay=true"),
)
SMALL: dict[str, Any] = {
    "data": "digits",
    "partition": "step:2,minor=2",
    "clients": 20,
    "server_data": 0.2,
    "net": "mlp:50",
    "rounds": 5,
    "words": ("epochs=5", "batch=10", "lr=0.01"),
}
SMOKE = {"server_data": 0.2, "partition": "step:2,minor=1", "per_class": None, "tested": None}
SLOW = "hours on two cores"
DIRICHLET = Case({"partition": "dirichlet:0.1"}, {"partition": "dirichlet:0.1"})


def with_networks(**first: Case) -> dict[str, Case]:
    """Return columns: each partition with the ConvNet and with four ResNets."""
    columns = {f"{name}, ConvNet": case for name, case in first.items()}
    for name, case in first.items():
        for depth in (20, 32, 44, 56):
            changes = {**case.changes, "net": f"resnet{depth}"}
            columns[f"{name}, ResNet{depth}"] = Case(changes, untried=SLOW)
    return columns


BOTH = with_networks(Step=Case(), Dirichlet=DIRICHLET)
TWO = {n: BOTH[n] for n in ("Step, ConvNet", "Step, ResNet20")}


def above(of: str, than: str, case: str = "Step, ConvNet", **more: Any) -> Claim:
    """Return the claim that one row is above another."""
    return Claim(f"{of} above {than}, {case}", of, than, case, "global", **more)


COMMON: dict[str, Any] = {
    "base": BASE,
    "small": SMALL,
    "smoke": SMOKE,
    "metrics": METRICS,
    "measure": measure,
    "figure": compared("global", "ensemble"),
}
STUDIES: dict[str, Study] = {
    "table1": Study(
        title="table 1",
        about="Ten clients with two major classes each, or Dirichlet(0.1) shares.",
        cases=BOTH,
        entries={
            "FedAvg": Entry("fedavg"),
            "v-Distillation": variant("teachers=C", "distil=sgd"),
            "FedBE (w/o SWA)": variant("distil=sgd"),
            "FedBE": FEDBE,
        },
        claims=(
            above("FedBE", "FedAvg"),
            above("FedBE", "FedAvg", "Dirichlet, ConvNet"),
            above("FedBE", "FedBE (w/o SWA)"),
            above("FedBE", "v-Distillation"),
            above("FedBE", "FedAvg", "Step, ResNet56"),
        ),
        **COMMON,
    ),
    "table2": Study(
        title="table 2; section C.6 (SCAFFOLD)",
        about="Other local training and server momentum underneath FedBE. With mu = 0.001, as in "
        "the authors' code, FedProx is nearly FedAvg, so that it has no claim here. SCAFFOLD fails "
        "at the clients' common rate.",
        cases=BOTH,
        entries={
            "FedProx": Entry("fedprox", ("mu=0.001",)),
            "FedBE + FedProx": variant("on=fedprox"),
            "FedAvgM": Entry("fedavgm", ("server_lr=0.1", "server_momentum=0.9")),
            "FedBE + FedAvgM": variant("on=fedavgm"),
            "SCAFFOLD": Entry("scaffold"),
            "FedBE + SCAFFOLD": variant("on=scaffold"),
        },
        claims=(
            above("FedBE + FedAvgM", "FedAvgM"),
            above("FedBE + SCAFFOLD", "SCAFFOLD", paper="+17.0 (ResNet20)"),
        ),
        **COMMON,
    ),
    "table3": Study(
        title="table 3",
        about="Teachers: the clients' average A, their models C, samples S. Without augmentation A "
        "is FedAvg, and S+A+C is FedBE, whose difference is a claim of table 1. Without the row "
        "of ground-truth labels, which the library's distillation does not take.",
        cases=TWO,
        entries={
            name: variant(f"teachers={word}", "sharpen=false") for name, word in TEACHERS.items()
        },
        claims=(
            above("S+A+C", "A+C"),
            above("S", "A"),
        ),
        **COMMON,
    ),
    "table4": Study(
        title="table 4; figure 5",
        about="Unlabeled rows of other data sets, or fewer. At size small the clients have MNIST, "
        "and in the column CIFAR-100 the server has 400 rows of Fashion-MNIST.",
        cases={
            "same data": Case(),
            "CIFAR-100": Case(
                {"server_data": "cifar100", "per_class": 4000},
                {"server_data": "fashion_mnist", "server_rows": 400, "per_class": 160},
            ),
            "Tiny-ImageNet": Case(
                {"server_data": "tiny_imagenet", "per_class": 4000},
                untried="Tiny-ImageNet could not be obtained",
            ),
            "fewer rows": Case({"server_rows": 1000}, {"server_rows": 100}),
        },
        entries={"FedAvg": Entry("fedavg"), "FedBE": FEDBE},
        claims=(
            Claim(
                "another data set does as well",
                "FedBE",
                "FedBE",
                "CIFAR-100",
                "global",
                "same data",
                sign=0,
            ),
            above("FedBE", "FedAvg", "fewer rows", paper="figure"),
        ),
        **COMMON
        | {
            "small": SMALL | {"data": "mnist", "pixels": 14, "per_class": 200, "tested": 100},
            "smoke": {"server_rows": 20, "partition": "iid", "pixels": None},
        },
    ),
    "table5": Study(
        title="table 5; table 9",
        about="Partial participation: a tenth of 100 clients in each round; at size small a fifth "
        "of 50.",
        cases={
            "i.i.d., ResNet20": Case(
                {"data": "tiny_imagenet", "partition": "iid", "net": "resnet20"},
                {"data": "digits", "partition": "iid"},
            ),
            "non-i.i.d., ResNet20": Case(
                {"data": "tiny_imagenet", "partition": "step:2,minor=1", "net": "resnet20"},
                {"data": "digits", "partition": "step:2,minor=1"},
            ),
            "CIFAR-100, ResNet20": Case(
                {"data": "cifar100", "partition": "step:5,minor=1", "net": "resnet20"}, untried=SLOW
            ),
        },
        entries={"FedAvg": Entry("fedavg"), "FedBE": FEDBE},
        claims=(
            above("FedBE", "FedAvg", "i.i.d., ResNet20"),
            above("FedBE", "FedAvg", "non-i.i.d., ResNet20"),
            above("FedBE", "FedAvg", "CIFAR-100, ResNet20"),
        ),
        **COMMON
        | {
            "base": replace(BASE, clients=100, participation="10", rounds=100),
            "small": SMALL | {"clients": 50, "participation": "0.2", "rounds": 10},
            "smoke": {"per_class": 16, "tested": 2, "participation": "0.5", "partition": "iid"},
        },
    ),
    "table6": Study(
        title="table 6",
        about="Stragglers: each client completes a random share of its epochs.",
        cases={"ConvNet": Case(), "ResNet20": Case({"net": "resnet20"}, untried=SLOW)},
        entries={
            "FedAvg": Entry("fedavg"),
            "FedProx": Entry("fedprox", ("mu=0.001",)),
            "FedBE": FEDBE,
        },
        claims=(above("FedBE", "FedAvg", "ConvNet"), above("FedBE", "FedProx", "ConvNet")),
        **COMMON | {"base": replace(BASE, min_work=0.05)},
    ),
    "table7": Study(
        title="table 7",
        about="Samples from a Dirichlet distribution over mixtures of the clients' models.",
        cases=TWO,
        entries={
            f"alpha = {a}": variant("posterior=dirichlet", f"alpha={a}") for a in (0.1, 0.5, 1, 2)
        },
        claims=tuple(
            Claim(
                f"alpha matters little ({a} and 0.5)",
                f"alpha = {a}",
                "alpha = 0.5",
                "Step, ConvNet",
                "global",
                sign=0,
                within=1.5,
            )
            for a in (0.1, 2)
        ),
        **COMMON,
    ),
    "table8": Study(
        title="table 8; 1-Ensemble of table 1",
        about="One round of many epochs.",
        entries={
            "weight average": variant("distil=none"),
            "model ensemble": variant("distil=none", "teachers=C"),
            "model ensemble, SWA": variant("teachers=C", "sharpen=false"),
            "Bayesian ensemble, SGD": variant("distil=sgd"),
            "Bayesian ensemble, SWA": FEDBE,
        },
        claims=(
            Claim(
                "the ensemble is above the average",
                "model ensemble",
                "weight average",
                "",
                "ensemble",
                than_metric="global",
            ),
            Claim(
                "samples improve the ensemble",
                "Bayesian ensemble, SWA",
                "model ensemble",
                "",
                "ensemble",
            ),
            Claim(
                "the student is far below its ensemble",
                "Bayesian ensemble, SWA",
                "Bayesian ensemble, SWA",
                "",
                "global",
                than_metric="ensemble",
                sign=-1,
            ),
        ),
        **COMMON
        | {
            "base": replace(BASE, rounds=1, words=("epochs=200", *BASE.words[1:])),
            "small": SMALL | {"rounds": 1, "words": ("epochs=20", "batch=10", "lr=0.01")},
            "smoke": SMOKE | {"rounds": 1},
            "shown": 3,
        },
    ),
    "figure2": Study(
        title="figure 2",
        about="Number M of samples among the teachers.",
        entries={f"M = {m}": variant(f"samples={m}") for m in (0, 1, 5, 10, 20)},
        claims=(
            Claim(
                "ten samples are better than none", "M = 10", "M = 0", "", "global", paper="figure"
            ),
            Claim(
                "twenty are no better than ten",
                "M = 20",
                "M = 10",
                "",
                "global",
                sign=0,
                paper="figure",
            ),
        ),
        **COMMON,
    ),
    "figure3": Study(
        title="figure 3",
        about="FedAvg, with the ensemble watched in the last round and not distilled.",
        entries={"FedAvg": variant("distil=none")},
        claims=(
            Claim(
                "the ensemble is above the average",
                "FedAvg",
                "FedAvg",
                "",
                "ensemble",
                than_metric="global",
                paper="figure",
            ),
        ),
        **COMMON | {"base": replace(BASE, net="resnet20"), "shown": 3},
    ),
    "figure13": Study(
        title="figure 13; figure 3 by round",
        about="Accuracy by round. The ensemble of FedAvg is watched and not distilled.",
        cases=TWO,
        entries={
            "FedAvg": variant("distil=none"),
            "v-Distillation": variant("teachers=C", "distil=sgd"),
            "FedBE": FEDBE,
        },
        claims=tuple(
            Claim(text, of, than, "Step, ConvNet", first, "", second, paper="figure")
            for text, of, than, first, second in (
                ("first, v-Distillation is above FedBE", *NAMED, "global_20", "global_20"),
                ("first, FedAvg's ensemble is above it", *TWICE, "ensemble_20", "global_20"),
                ("last, FedAvg's ensemble is above it", *TWICE, "ensemble_100", "global_100"),
            )
        ),
        **COMMON
        | {
            "small": SMALL | {"rounds": 10},
            "metrics": tuple(f"{view}_{p}" for view in ("global", "ensemble") for p in PARTS),
            "measure": measure_by_round,
            "shown": len(PARTS),
            "figure": by_round("global"),
        },
    ),
}
