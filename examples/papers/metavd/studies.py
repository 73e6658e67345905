"""Tables of MetaVD (Jeon and others, NeurIPS 2023), whose text here has few of their numbers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness import PARTS, Case, Claim, Entry, Settings, Study, Trial, in_parts
from plots import by_round, compared

from pyrofl.metrics import calibration_error

METRICS = ("test", "ood", "ood_ece", "ood_mce", "sparsity")


def measure(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies of training and held-out (OOD) clients, ECE and MCE of the latter.

    Methods with random weights are tested with ten draws.
    """
    run = trial.fit()
    how: dict[str, Any] = {"adaptation": "fine_tune" if run.method.adapt else "none"}
    random = trial.method == "metavd" and "dropout=none" not in trial.words
    how |= {"draws": 10 if random else None}
    bins = run.calibration(population="held_out", **how)
    ece, mce = (float(value.mean()) for value in calibration_error(bins))
    scores: dict[str, float | None] = {"ood_ece": ece, "ood_mce": mce}
    scores["test"] = run.evaluate(**how).mean("accuracy")
    scores["ood"] = run.evaluate(population="held_out", **how).mean("accuracy")
    if trial.method == "metavd":
        scores["sparsity"] = float(run.statistics()["sparsity"].mean())
    return scores


def measure_by_round(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies of training and held-out (OOD) clients by round."""
    draws = None if "dropout=none" in trial.words else 10
    scores = dict[str, float | None]()
    for part, run in in_parts(trial):
        how: dict[str, Any] = {"adaptation": "fine_tune" if run.method.adapt else "none"}
        for name, population in (("test", "training"), ("ood", "held_out")):
            found = run.evaluate(population=population, draws=draws, **how)
            scores[f"{name}_{part}"] = found.mean("accuracy")
    return scores


X = {"FedAvg": "fedavg", "Reptile": "reptile", "MAML": "maml", "PerFedAvg": "perfedavg"}


def on(name: str, *words: str) -> Entry:
    """Return MetaVD, or the method X that it builds on, with the settings of MetaVD's tuning.

    On PerFedAvg, which diverges at that rate, both have the rate of PerFedAvg's tuning.
    """
    rate = ("lr=0.01",) if name == "PerFedAvg" else ()
    varied = ("lr",) if rate else ()
    return Entry("metavd", (f"on={X[name]}", *rate, *words), paper=("lr=0.02",), varied=varied)


PLAIN = {name: on(name, "dropout=none") for name in X}
METAVD = {f"{name} + MetaVD": on(name) for name in X}
WORDS = ("epochs=5", "batch=64", "lr=0.02")
BASELINES = {
    "FedAvg": PLAIN["FedAvg"],
    "FedAvg + FT": Entry("fedavg", ("fine_tune=1",)),
    "FedProx": Entry("fedprox", ("mu=0.1",)),
    "FedBE": Entry("fedbe", changes={"server_data": 0.04}),
    "pFedGP": Entry("pfedgp"),
}
BASE = Settings(
    data="cifar10",
    partition="dirichlet:0.1,min=4",
    clients=100,
    held_out=30,
    net="cnn-metavd",
    rounds=1000,
    participation="10",
    words=WORDS,
)
SMALL = {
    "pixels": 16, "per_class": 300, "tested": 100, "clients": 20, "held_out": 6,
    "net": "mlp:64,32", "rounds": 20, "participation": "0.5",
}  # fmt: skip
SMOKE = {"held_out": 4, "net": "mlp:8,4", "partition": "iid", "per_class": None, "tested": None,
         "participation": "0.5"}  # fmt: skip
HETEROGENEITY = {
    f"{label}, Dirichlet({alpha})": Case(
        {"data": data, "partition": f"dirichlet:{alpha},min=4"},
        {"per_class": rows},
    )
    for label, data, rows in (("CIFAR-10", "cifar10", 300), ("CIFAR-100", "cifar100", 30))
    for alpha in (0.1, 0.5, 5)
}
TEN, HUNDRED = "CIFAR-10, Dirichlet(0.5)", "CIFAR-100, Dirichlet(0.5)"
COMMON: dict[str, Any] = {
    "base": BASE,
    "small": SMALL,
    "smoke": SMOKE,
    "metrics": METRICS,
    "measure": measure,
    "shown": 4,
    "tuning": "cifar10/budget.csv",
    "figure": compared("test", "ood"),
}


def better(name: str, case: str, metric: str = "ood", sign: int = 1, of: str = "") -> Claim:
    """Return the claim that X + MetaVD is better than X."""
    what = {"test": "accuracy", "ood": "accuracy of held-out clients"}
    what |= {"ood_ece": "ECE of held-out clients", "ood_mce": "MCE of held-out clients"}
    word = "above" if sign > 0 else "below"
    of = of or f"{name} + MetaVD"
    text = f"{what[metric]} of {of} {word} {name}'s, {case}"
    return Claim(text, of, name, case, metric, sign=sign, paper="higher" if sign > 0 else "lower")


PARTICIPATION = {f"{n} of 160 clients": n for n in (40, 20, 10)}
STUDIES: dict[str, Study] = {
    "table1": Study(
        title="tables 1, 3, 7, 8, 11 and 12",
        about="Accuracy, and calibration of held-out (OOD) clients with 15 bins of the largest "
        "probability.",
        cases={name: HETEROGENEITY[name] for name in (TEN, HUNDRED)} | HETEROGENEITY,
        entries=BASELINES | {n: e for n, e in PLAIN.items() if n != "FedAvg"} | METAVD,
        claims=(
            *(better(name, TEN, "test") for name in X),
            *(better(name, TEN) for name in X),
            better("Reptile", HUNDRED),
            better("Reptile", HUNDRED, "ood_ece", -1),
            better("Reptile", HUNDRED, "ood_mce", -1),
        ),
        **COMMON,
    ),
    "rounds": Study(
        title="table 1 by round",
        about="After 20 rounds, as in the other tables at size small, the dropout rates have just "
        "diverged; here five times as many.",
        cases={TEN: HETEROGENEITY[TEN]},
        entries={"Reptile": PLAIN["Reptile"], "Reptile + MetaVD": METAVD["Reptile + MetaVD"]},
        claims=tuple(
            Claim(
                f"{text} of Reptile + MetaVD above Reptile's, {TEN}",
                "Reptile + MetaVD", "Reptile", TEN, f"{metric}_100", paper="higher",
            )
            for metric, text in
            (("test", "accuracy"), ("ood", "accuracy of held-out clients"))
        ),
        **COMMON
        | {
            "small": SMALL | {"rounds": 100},
            "metrics": tuple(f"{name}_{part}" for name in ("test", "ood") for part in PARTS),
            "measure": measure_by_round,
            "shown": len(PARTS),
            "figure": by_round("test"),
        },
    ),
    "table2": Study(
        title="table 2",
        about="One dropout rate of each weight for all clients (VD), one for each client without "
        "hypernetwork (EnsembleVD), and MetaVD.",
        cases={
            "CIFAR-100": Case(
                {"data": "cifar100", "partition": "dirichlet:0.5,min=4"},
                {"per_class": 30, "rounds": 40},
            )
        },
        entries={
            "Reptile": PLAIN["Reptile"],
            "Reptile + VD": on("Reptile", "dropout=vd"),
            "Reptile + EnsembleVD": on("Reptile", "dropout=ensemble"),
            "Reptile + MetaVD": METAVD["Reptile + MetaVD"],
        },
        claims=tuple(
            Claim(
                f"MetaVD above {name}", "Reptile + MetaVD", name, "CIFAR-100", "ood",
                paper="higher",
            )
            for name in ("Reptile", "Reptile + VD", "Reptile + EnsembleVD")
        ),
        **COMMON,
    ),
    "table4": Study(
        title="table 4",
        about="Participation with 160 training and 40 held-out writers of FEMNIST, the first 200 "
        "of LEAF's files (preprocess.sh -s niid --sf 0.1 -k 0 -t sample --tf 0.8). At size small a "
        "stand-in: MNIST with Dirichlet(0.5) shares, and twice the shares of participants.",
        cases={
            name: Case(
                {"participation": str(n)},
                {"data": "mnist", "partition": "dirichlet:0.5,min=4", "participation": str(n / 80)},
            )
            for name, n in PARTICIPATION.items()
        },
        entries={n: e for n, e in (BASELINES | PLAIN | METAVD).items() if n in (
            "FedAvg", "FedAvg + FT", "Reptile", "FedAvg + MetaVD", "Reptile + MetaVD",
        )},
        claims=tuple(better("Reptile", name) for name in PARTICIPATION),
        **COMMON
        | {"base": Settings(data="femnist", partition="groups", clients=160, held_out=40,
                            net="cnn-metavd", pixels=32, rounds=1000, words=WORDS)}
        | {"smoke": SMOKE
           | {"data": "femnist", "partition": "groups", "clients": None, "held_out": 1,
              "pixels": None}},
    ),
    "table5": Study(
        title="table 5",
        about="Data sets joined as domains. The first column is a stand-in; the paper lacks it. At "
        "size small MNIST stands for FEMNIST.",
        cases={
            "Fashion-MNIST + MNIST (stand-in)": Case({"data": "fashion_mnist+mnist"}),
            "CelebA + CIFAR-100": Case(
                {"data": "celeba+cifar100"}, untried="CelebA could not be obtained"
            ),
            "CIFAR-100 + FEMNIST": Case(
                {"data": "cifar100+femnist"}, {"data": "cifar100+mnist", "per_class": 60}
            ),
            "CelebA + FEMNIST": Case(
                {"data": "celeba+femnist"}, untried="CelebA could not be obtained"
            ),
            "CelebA + CIFAR-100 + FEMNIST": Case(
                {"data": "celeba+cifar100+femnist"}, untried="CelebA could not be obtained"
            ),
        },
        entries=PLAIN | METAVD,
        claims=(
            better("Reptile", "Fashion-MNIST + MNIST (stand-in)"),
            better("Reptile", "CIFAR-100 + FEMNIST"),
            better("Reptile", "CelebA + CIFAR-100"),
        ),
        **COMMON
        | {"base": replace(BASE, pixels=32)}
        | {"smoke": SMOKE | {"pixels": 8}},
    ),
    "table6": Study(
        title="tables 6, 16 and 17",
        about="Weights with dropout rates above 0.9 are dropped (DP), or those of SNIP. Sparsity "
        "counts weights that are set to zero, none without DP.",
        cases={TEN: HETEROGENEITY[TEN]} | HETEROGENEITY,
        entries=METAVD
        | {f"{name} + MetaVD + DP": on(name, "prune=0.9") for name in X if name != "FedAvg"}
        | {f"{name} + SNIP": on(name, "dropout=none", "prune=snip") for name in X},
        claims=(
            Claim("accuracy is unchanged with DP", "Reptile + MetaVD + DP", "Reptile + MetaVD", TEN,
                  "test", sign=0, paper="about equal"),
        ),
        **COMMON | {"shown": 5},
    ),
}  # fmt: skip
