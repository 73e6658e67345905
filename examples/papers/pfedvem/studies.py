"""Tables and figures of pFedVEM (Zhu, Ma and Blaschko, CVPR 2023)."""

from collections.abc import Mapping
from dataclasses import replace

from harness import PARTS, Case, Claim, Entry, Settings, Study, Trial, in_parts
from plots import by_round, compared

BASELINES: dict[str, Entry] = {
    "Local": Entry("local"),
    "FedAvg": Entry("fedavg"),
    "FedProx": Entry("fedprox"),
    "SCAFFOLD": Entry("scaffold"),
    "FedPer": Entry("fedper"),
    "FedRep": Entry("fedrep", ("head_epochs=10",)),
    "IFCA": Entry("ifca", ("clusters=2",)),
    "Per-FedAvg": Entry("perfedavg"),
    "pFedMe": Entry("pfedme"),
    "pFedBayes": Entry("pfedbayes", ("batch=50", "num_particles=5")),
}
VEM = {"pFedVEM": Entry("pfedvem", paper=("lr_head=0.001", "lr_base=0.001"))}
DRIFT = {"pFedVEM": Entry("pfedvem", ("head_epochs=20",), paper=("lr_head=0.001", "lr_base=0.01"))}
ABLATIONS = {
    "uncertainty": replace(DRIFT["pFedVEM"], words=("head_epochs=20", "confidence=uncertainty")),
    "deviation": replace(DRIFT["pFedVEM"], words=("head_epochs=20", "confidence=deviation")),
}
METRICS = ("personal", "global", "smallest", "small_third", "large_third", "personal_quarter")
METRICS += ("global_quarter", "tau_spread", "deviation")


def measure(trial: Trial) -> Mapping[str, float | None]:
    """Return accuracies of all, small and large clients, and of the first quarter of the rounds.

    Personal models are tested on all test rows of the client's labels. `tau_spread` is the standard
    deviation of J tau_j / sum_j tau_j (figure 10), `deviation` the mean of ||mu_j - w||^2 / d
    (figure 11).
    """
    quarter = trial.fit(rounds=max(1, trial.settings.rounds // 4))
    early = accuracies(trial, quarter)
    run = trial.fit(resume_from=quarter)
    scores = accuracies(trial, run)
    scores |= {f"{name}_quarter": early[name] for name in ("personal", "global")}
    known = run.statistics()
    if trial.method == "pfedvem":
        tau = known["tau"].double()
        scores["tau_spread"] = float((tau / tau.mean()).std())
        scores["deviation"] = float(known["deviation"].double().mean())
    return scores


def accuracies(trial: Trial, run) -> dict[str, float | None]:
    """Return the accuracies of personal models, by size of the clients, and of the global model."""
    scores: dict[str, float | None] = dict.fromkeys(("personal", "global"))
    if "personal" in run.method.views:
        adaptation = "fine_tune" if trial.method == "perfedavg" else "none"
        of = run.evaluate(model="personal", adaptation=adaptation)
        sizes = run.data.sizes
        scores["personal"] = of.mean("accuracy")
        scores["smallest"] = of.smallest(0.1, sizes).mean("accuracy")
        scores["small_third"] = of.smallest(1 / 3, sizes).mean("accuracy")
        scores["large_third"] = of.smallest(1 / 3, -sizes).mean("accuracy")
    if "global" in run.method.views:
        pooled = run.evaluate(model="global", population="pooled")
        scores["global"] = pooled.mean("accuracy")
    return scores


def measure_by_round(trial: Trial) -> dict[str, float | None]:
    """Return the accuracy of personal models by round."""
    return {
        f"personal_{percent}": accuracies(trial, run)["personal"]
        for percent, run in in_parts(trial)
    }


BASE = Settings(
    partition="slices:5",
    test="same_classes",
    rounds=100,
    participation="bernoulli:0.1",
    words=("epochs=5", "base_epochs=5", "batch=10", "num_particles=5"),
)
ABLATION = replace(  # concept drift, whose head has epochs of its own
    BASE,
    data="cifar100-coarse",
    partition="drift",
    clients=50,
    net="cnn-pfedvem-100",
    words=("base_epochs=5", "batch=50", "num_particles=5"),
)
SMALL = {"rounds": 30, "participation": "bernoulli:0.3"}
FEW = {  # for color images
    "pixels": 16, "per_class": 100, "tested": 50, "net": "mlp:50", "clients": 20, "rounds": 15,
    "participation": "bernoulli:0.3",
}  # fmt: skip


def by_clients(data: str, untried: str = "", small_share: float = 1) -> dict[str, Case]:
    """Return the columns of table 1: 50, 100 and 200 clients, at size small a share of these."""
    return {
        f"{n} clients": Case(
            {"data": data, "clients": n}, {"clients": round(small_share * n)}, untried
        )
        for n in (50, 100, 200)
    }


def ahead(case: str, metric: str, *names: str, text: str = "") -> tuple[Claim, ...]:
    """Return claims that pFedVEM is above other methods."""
    models = {"personal": "personal models", "global": "the global model"}
    models["smallest"] = "personal models of the smallest clients (table 5)"
    return tuple(
        Claim(f"{models[metric]} above {name}'s, {case}", "pFedVEM", name, case, metric)
        for name in names
    )


STUDIES: dict[str, Study] = {
    "table1_fashion": Study(
        title="table 1, Fashion-MNIST",
        about="Label skew: five of ten labels per client, slices of random size.",
        base=replace(BASE, data="fashion_mnist", net="mlp:100"),
        small=SMALL | {"per_class": 200, "net": "mlp:50"},
        cases=by_clients("fashion_mnist"),
        entries=BASELINES | VEM,
        metrics=METRICS,
        measure=measure,
        shown=2,
        tuning="budget.csv",
        figure=compared("personal", "global"),
        claims=(
            *ahead("100 clients", "personal", "Local", "FedPer"),
            Claim(
                "personal models as accurate as pFedMe's",
                "pFedVEM",
                "pFedMe",
                "100 clients",
                "personal",
                sign=0,
            ),
            *ahead("100 clients", "global", "FedAvg"),
        ),
    ),
    "table1_cifar10": Study(
        title="table 1, CIFAR-10; table 5",
        about="As Fashion-MNIST; at size small a fifth of the clients.",
        base=replace(BASE, data="cifar10", net="cnn-pfedvem"),
        small=FEW,
        cases=by_clients("cifar10", small_share=0.2),
        entries=BASELINES | VEM,
        metrics=METRICS,
        measure=measure,
        shown=3,
        tuning="cifar10/budget.csv",
        figure=compared("personal", "global"),
        claims=(
            *ahead("100 clients", "personal", "FedPer", "pFedMe"),
            *ahead("100 clients", "global", "FedAvg"),
            *ahead("100 clients", "smallest", "FedPer", "FedRep"),
        ),
    ),
    "figure12": Study(
        title="figure 12",
        about="Personal models by round. pFedBayes was not run.",
        base=replace(BASE, data="cifar10", net="cnn-pfedvem"),
        small=FEW,
        cases=by_clients("cifar10", small_share=0.2),
        entries={
            name: BASELINES[name] for name in ("Local", "FedPer", "FedRep", "Per-FedAvg", "pFedMe")
        }
        | VEM,
        metrics=tuple(f"personal_{percent}" for percent in PARTS),
        measure=measure_by_round,
        shown=len(PARTS),
        tuning="cifar10/budget.csv",
        figure=by_round("personal"),
        claims=tuple(
            Claim(
                f"after 30% of the rounds above {name}, {case}",
                "pFedVEM",
                name,
                case,
                "personal_30",
                paper="figure",
            )
            for case in ("100 clients",)
            for name in ("FedPer", "FedRep", "pFedMe")
        ),
    ),
    "table1_cifar100": Study(
        title="table 1, CIFAR-100; table 5; figure 2",
        about="Concept drift: superclasses are predicted, and of each a client has one fine class. "
        "At size small two fifths of the clients.",
        base=replace(
            BASE,
            data="cifar100-coarse",
            partition="drift",
            net="cnn-pfedvem-100",
            words=("epochs=5", "base_epochs=5", "batch=50", "num_particles=5"),
        ),
        small=FEW,
        cases=by_clients("cifar100-coarse", small_share=0.4),
        entries=BASELINES | DRIFT,
        metrics=METRICS,
        measure=measure,
        shown=3,
        tuning="cifar10/budget.csv",
        figure=compared("personal", "global"),
        claims=(
            *ahead("50 clients", "personal", "pFedMe", "FedRep", "Local"),
            *ahead("50 clients", "global", "FedAvg"),
            Claim(
                "small clients gain over Local (figure 2)",
                "pFedVEM",
                "Local",
                "50 clients",
                "small_third",
                paper="figure",
            ),
            Claim(
                "large clients gain, too (figure 2)",
                "pFedVEM",
                "Local",
                "50 clients",
                "large_third",
                paper="figure",
            ),
        ),
    ),
    "table1_sun397": Study(
        title="table 1, SUN397",
        about="Concept drift with three superclasses of 50 fine classes, 64 x 64 pixels.",
        base=replace(
            BASE,
            data="sun397-coarse",
            partition="drift",
            net="cnn-pfedvem-100",
            words=("epochs=5", "base_epochs=5", "batch=50", "num_particles=5"),
        ),
        cases=by_clients("sun397-coarse", untried="SUN397 could not be obtained"),
        smoke={"per_class": None, "tested": None},
        entries=BASELINES | DRIFT,
        metrics=METRICS,
        measure=measure,
        shown=2,
        tuning="cifar10/budget.csv",
        claims=ahead("50 clients", "personal", "pFedMe"),
    ),
    "table2": Study(
        title="table 2",
        about="Without the deviation in the confidence, where clients differ and where not.",
        base=ABLATION,
        small=FEW,
        smoke={"per_class": None, "tested": None, "clients": 5},
        cases={"hetero": Case(), "homo": Case({"partition": "slices:100"})},
        entries={"pFedVEM": DRIFT["pFedVEM"], "uncertainty only": ABLATIONS["uncertainty"]},
        metrics=METRICS,
        measure=measure,
        tuning="cifar10/budget.csv",
        claims=(
            Claim(
                "the deviation matters if clients differ",
                "pFedVEM",
                "uncertainty only",
                "hetero",
                "personal",
            ),
            Claim(
                "it matters little if they do not",
                "pFedVEM",
                "uncertainty only",
                "homo",
                "personal",
                sign=0,
            ),
        ),
    ),
    "table3": Study(
        title="table 3",
        about="Without the uncertainty in the confidence, with unequal and equal numbers of rows.",
        base=ABLATION,
        small=FEW,
        cases={"random": Case(), "equal": Case({"partition": "drift,equal"})},
        entries={"pFedVEM": DRIFT["pFedVEM"], "deviation only": ABLATIONS["deviation"]},
        metrics=METRICS,
        measure=measure,
        tuning="cifar10/budget.csv",
        claims=(
            Claim(
                "the uncertainty matters if sizes differ",
                "pFedVEM",
                "deviation only",
                "random",
                "personal",
            ),
            Claim(
                "it matters little if they do not",
                "pFedVEM",
                "deviation only",
                "equal",
                "personal",
                sign=0,
            ),
        ),
    ),
    "table6": Study(
        title="table 6",
        about="Table 1, CIFAR-10 with 100 clients, with fewer training rows over all clients.",
        base=replace(BASE, data="cifar10", clients=100, net="cnn-pfedvem"),
        small=FEW,
        cases={
            "5,000 rows": Case({"per_class": 500}, {"per_class": 50}),
            "10,000 rows": Case({"per_class": 1000}, {"per_class": 100}),
            "50,000 rows": Case({}, {"per_class": 500}),
        },
        entries=BASELINES | VEM,
        metrics=METRICS,
        measure=measure,
        shown=2,
        tuning="cifar10/budget.csv",
        figure=compared("personal", "global"),
        claims=ahead("5,000 rows", "personal", "pFedBayes", "pFedMe", "FedPer"),
    ),
    "table7": Study(
        title="table 7, Digit-Five",
        about="Feature skew: each client has rows of one of five data sets of digits.",
        base=replace(BASE, data="digit_five", partition="domains:slices:5", net="cnn-pfedvem"),
        cases=by_clients("digit_five", untried="Digit-Five could not be obtained"),
        smoke={"per_class": None, "tested": None},
        entries={n: BASELINES[n] for n in ("FedProx", "pFedMe", "pFedBayes")} | VEM,
        metrics=METRICS,
        measure=measure,
        shown=2,
        tuning="cifar10/budget.csv",
        claims=ahead("100 clients", "personal", "pFedMe"),
    ),
}
