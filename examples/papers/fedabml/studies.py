"""Tables and figures of FedABML (Liu and others, 2023); figures 2 and 5 have their own scripts."""

from collections.abc import Mapping
from typing import Any

from harness import Case, Claim, Entry, Settings, Study, Trial
from plots import compared

EPOCHS = (0, 1, 2, 5, 10)  # of fine-tuning new clients
NEW = tuple(f"after_{n}" for n in EPOCHS)


def measure(trial: Trial) -> Mapping[str, float | None]:
    """Return the mean accuracy of the clients' models, after fine-tuning if the method has it."""
    run = trial.fit()
    how = {"adaptation": "fine_tune" if run.method.adapt else "none"}
    view = "personal" if "personal" in run.method.views else "global"
    return {"accuracy": run.evaluate(model=view, **how).mean("accuracy")}


def new_clients(trial: Trial) -> Mapping[str, float | None]:
    """Return the mean accuracy of clients that did not train, after epochs of fine-tuning."""
    run, scores = trial.fit(), dict[str, float | None]()
    for epochs in EPOCHS:
        tuned = trial.built(f"fine_tune={epochs}")
        how = {"model": "personal", "adaptation": "fine_tune"} if epochs else {"model": "global"}
        found = run.copy(method=tuned).evaluate(population="held_out", **how)
        scores[f"after_{epochs}"] = found.mean("accuracy")
    return scores


TUNED = ("fine_tune=5",)
PLAIN = ("fine_tune=0",)
ABML = Entry("fedabml", TUNED, paper=("kl=0.1", "steps=5", "num_particles=5"))
ROWS = {
    "Local": Entry("local"),
    "FedAvg": Entry("fedavg", PLAIN),
    "FedAvg + FT": Entry("fedavg", TUNED),
    "FedProx": Entry("fedprox", PLAIN, paper=("mu=0.25",)),
    "FedProx + FT": Entry("fedprox", TUNED, paper=("mu=0.25",)),
    "SCAFFOLD": Entry("scaffold", PLAIN, paper=("server_lr=1",)),
    "SCAFFOLD + FT": Entry("scaffold", TUNED, paper=("server_lr=1",)),
    "FedRep": Entry("fedrep"),
    "FedBABU": Entry("fedbabu", TUNED),
    "FedPop": Entry("fedpop"),
    "Per-FedAvg": Entry("perfedavg", paper=("inner_lr=0.0001",)),
    "pFedMe": Entry("pfedme", ("steps=5",), paper=("strength=15",)),
    "Ditto": Entry("ditto", paper=("strength=0.75",)),
    "pFedBayes": Entry("pfedbayes", ("steps=5",), paper=("kl=0.05",)),
    "FedABML": ABML,
}
NEW_ROWS = {
    "FedAvg": Entry("fedavg"),
    "FedProx": Entry("fedprox", paper=("mu=0.25",)),
    "Per-FedAvg": Entry("perfedavg", paper=("inner_lr=0.0001",)),
    "pFedMe": Entry("pfedme", ("steps=5",), paper=("strength=15",)),
    "pFedBayes": Entry("pfedbayes", ("steps=5",), paper=("kl=0.05",)),
    "FedABML": ABML,
}
FASHION = "Fashion-MNIST, 200 clients, 2 classes"
SMALL = {"clients": 50, "per_class": 100, "tested": 100, "rounds": 15, "participation": "0.3"}


def column(data: str, clients: int, classes: int, net: str, untried: str = "") -> Case:
    """Return a column of table 1: at most this number of classes per client."""
    changes = {"data": data, "clients": clients, "partition": f"labels:{classes}", "net": net}
    small: dict[str, Any] = {} if net == "softmax" else {"net": "mlp:50", "pixels": 16}
    if data == "cifar100":
        small["per_class"] = 20
    return Case(changes, small, untried)


COLUMNS = {
    FASHION: column("fashion_mnist", 200, 2, "softmax"),
    "CIFAR-10, 2 classes": column("cifar10", 100, 2, "cnn-fedabml"),
    "CIFAR-10, 5 classes": column("cifar10", 100, 5, "cnn-fedabml"),
    "CIFAR-100, 5 classes": column("cifar100", 100, 5, "resnet20"),
    "CIFAR-100, 20 classes": column("cifar100", 100, 20, "resnet20"),
    "EMNIST, 3 classes": column("emnist", 150, 3, "mlp:200", "EMNIST could not be obtained"),
}
WORDS = ("epochs=5", "batch=50", "num_particles=5")
BASE = Settings(net="cnn-fedabml", rounds=100, participation="0.1", words=WORDS)
CIFAR = "CIFAR-10, 2 classes"
SWEEPS = {
    "lambda": ("kl", (0.001, 0.01, 0.1, 1, 10)),
    "k": ("steps", (1, 3, 5, 7)),
    "s": ("num_particles", (1, 2, 5, 10)),
}


def sweep(data: str, net: str, title: str, small: str, small_net: str) -> Study:
    """Return the study of lambda, k and s (figures 3 and 4)."""
    changes: dict[str, Any] = {"data": data, "clients": 100, "partition": "labels:2", "net": net}
    entries = {
        f"{letter} = {value}": Entry("fedabml", (f"{name}={value}", *TUNED), varied=(name, "kl"))
        for letter, (name, values) in SWEEPS.items()
        for value in values
    }
    rows = {
        "a larger lambda hurts": ("lambda = 10", "lambda = 0.1", -1),
        "a smaller k hurts": ("k = 1", "k = 5", -1),
        "s matters little": ("s = 1", "s = 5", 0),
    }
    return Study(
        title=title,
        about="Weight of the KL term lambda, inner steps k and samples s; at size small with "
        f"{small}.",
        base=BASE,
        small=SMALL | {"data": small.lower().replace("-", "_"), "net": small_net},
        cases={"": Case(changes)},
        entries=entries,
        metrics=("accuracy",),
        measure=measure,
        tuning="budget.csv",
        figure=compared("accuracy"),
        claims=tuple(
            Claim(text, of, than, "", "accuracy", sign=sign, paper="figure")
            for text, (of, than, sign) in rows.items()
        ),
    )


STUDIES: dict[str, Study] = {
    "table1": Study(
        title="table 1",
        about="Clients with few classes. ResNet-20 stands for the paper's ResNet-18; all clients "
        "are tested after the last round, in the paper in the last ten.",
        base=BASE,
        small=SMALL,
        smoke={"clients": 21},
        cases=COLUMNS,
        entries=ROWS,
        metrics=("accuracy",),
        measure=measure,
        tuning="budget.csv",
        figure=compared("accuracy"),
        skipped=lambda case, name: case == FASHION and name in ("FedRep", "FedBABU", "FedPop"),
        claims=tuple(
            Claim(f"FedABML above {name}, {case}", "FedABML", name, case, "accuracy")
            for case in (FASHION, "CIFAR-10, 5 classes", "CIFAR-100, 20 classes")
            for name in ("FedAvg + FT", "Ditto", "pFedBayes")
        ),
    ),
    "table2": Study(
        title="table 2",
        about="A fifth of the clients trains; the others are new, fine-tuned for epochs. At size "
        "small with Fashion-MNIST, and two fifths train.",
        base=BASE,
        small=SMALL | {"clients": 20, "held_out": 30, "data": "fashion_mnist", "net": "softmax"},
        smoke={"held_out": 10},
        cases={
            CIFAR: Case(
                {"data": "cifar10", "clients": 20, "held_out": 80, "partition": "labels:2"}
            ),
            "CIFAR-10, 5 classes": Case(
                {"data": "cifar10", "clients": 20, "held_out": 80, "partition": "labels:5"}
            ),
        },
        entries=NEW_ROWS,
        metrics=NEW,
        measure=new_clients,
        shown=len(NEW),
        tuning="budget.csv",
        claims=tuple(
            Claim(f"FedABML above {name} after {n} epochs", "FedABML", name, CIFAR, f"after_{n}")
            for name in ("FedAvg", "pFedMe", "Per-FedAvg")
            for n in (1, 10)
        ),
    ),
    "figure3": sweep("cifar10", "cnn-fedabml", "figure 3", "Fashion-MNIST", "softmax"),
    "figure4": sweep("emnist", "mlp:200", "figure 4", "MNIST", "mlp:50"),
}
