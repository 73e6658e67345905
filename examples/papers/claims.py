"""What the papers claim, and whether it appears here: the table of the first page."""

from statistics import mean

from files import HERE, Lines, best, by, finished, gains, kept, markdown, numbers, read, spread


def hundred() -> dict[str, Lines]:
    """Return pFedVEM's table of 100 clients by method."""
    lines = [line for line in read(HERE / "pfedvem/table.csv") if line["clients"] == "100"]
    return finished(lines, "method")


def hundred_by(column: str, *methods: str) -> str:
    """Return pFedVEM's table of 100 clients in a line."""
    of = hundred()
    return "; ".join(f"{m} {spread(numbers(of[m], column, 100))}" for m in methods)


def at_forty(
    metric: str, method: str, scale: float = 100, file: str = "overfit", who: str = "training"
) -> str:
    """Return a score of MetaVD's page at round 40: of ten draws, or of what has none."""
    return spread(at_40(metric, method, scale, file, who), ".3g", ".2g")


def at_40(metric: str, method: str, scale: float, file: str, who: str) -> list[float]:
    """Return the same by seed."""
    where = {"round": "40", "population": who, "by": "draws" if "VD" in method else "mean"}
    return kept(f"metavd/{file}.csv", "value", scale, metric=metric, method=method, **where)


def metavd(metric: str, file: str, who: str = "training") -> str:
    """Return what X + MetaVD changes at round 40, seed by seed."""
    of, plain = (at_40(metric, method, 100, file, who) for method in ("X+MetaVD", "X"))
    change = spread([a - b for a, b in zip(of, plain, strict=True)], "+.1f")
    return f"{change} from {mean(plain):.1f}"


def above_fedavg(of: Lines, than: Lines) -> list[float]:
    """Return how far each seed's student is above the average that FedAvg has with that seed."""
    fedavg = {line["seed"]: float(line["average"]) for line in than}
    return [float(line["student"]) - fedavg[line["seed"]] for line in of]


def claims() -> str:
    """Return what the papers claim, what appears here, and how we would say it in a word."""

    def student(**setting: str) -> str:
        of = [kept("fedbe/students.csv", which, 1, **setting) for which in ("student", "average")]
        return spread([a - b for a, b in zip(*of, strict=True)], "+.1f")

    def image(setting: str, file: str = "cifar10") -> str:
        of = by(read(HERE / f"fedbe/{file}.csv"), "setting")
        return spread(above_fedavg(of[setting], of["FedAvg"]), "+.1f")

    step = {"partition": "step:2,minor=2"}
    rolls = [kept("fedbe/swiss_roll.csv", which, 1, lr="0.003") for which in ("ensemble", "fedavg")]
    coin = [a - b for a, b in zip(*rolls, strict=True)]
    full = hundred()
    lost = spread(gains(full["pFedVEM, deviation only"], full["pFedVEM"], "personal"), "+.1f")
    kept_up = spread(gains(full["pFedVEM, uncertainty only"], full["pFedVEM"], "personal"), "+.1f")
    five = best(read(HERE / "pfedmb/pairs.csv"), "tuning", over="rate")

    def above(name: str) -> str:
        return spread(gains(five[name], five["FedAvg"], "after"), "+.2f")

    def nine(column: str, *methods: str) -> str:
        second = by(read(HERE / "pfedmb/others.csv"), "column")[column]
        of = best(second, "tuning", over="rate")
        return "; ".join(f"{name} {spread(numbers(of[name], 'after', 100))}" for name in methods)

    rows = [
        [
            "pFedVEM",
            "personal models are best, 100 clients",
            "91.4; pFedMe 91.4, FedPer 90.7, Local 87.5",
            "86.1 with 5,000 rows (Local not run)",
            hundred_by("personal", "pFedVEM", "pFedMe", "FedPer", "Local"),
            "appears, but beside pFedMe: level, as in the paper; with 200 clients pFedMe is above",
        ],
        [
            "",
            "its global model is good, too",
            "85.6; FedAvg 85.4, FedProx 86.3",
            "80.9 with 5,000 rows",
            hundred_by("global", "pFedVEM", "FedAvg", "FedProx"),
            "appears",
        ],
        [
            "",
            "small clients are served best (CIFAR-10)",
            "70.2; FedPer 66.2",
            "",
            hundred_by("smallest", "pFedVEM", "FedPer", "Local"),
            "under conditions: beside Local, not beside FedPer",
        ],
        [
            "",
            "uncertainty counts in the confidence (CIFAR-100)",
            "-1.0 without",
            "",
            lost,
            "appears",
        ],
        [
            "",
            "deviation counts in the confidence (CIFAR-100)",
            "-1.1 without, -0.2 if clients are alike",
            "",
            kept_up,
            "does not appear with label skew",
        ],
        [
            "pFedMB",
            "five branches gain on FedAvg, both fine-tuned (table I)",
            "+1.5",
            "",
            above("5 branches"),
            "appears, small",
        ],
        [
            "",
            "weighting by alpha matters",
            "+1.1 without",
            "",
            above("5 branches, unweighted"),
            "appears",
        ],
        [
            "",
            "best of nine methods, Dirichlet, 15 clients (table II)",
            "73.5; FedAvg 73.5, pFedMe 72.9, Local 67.5",
            "",
            nine("Dirichlet, 15", "pFedMB", "FedAvg", "pFedMe", "Local"),
            "does not appear at this scale: pFedMe is best",
        ],
        [
            "",
            "the same, two classes, 50 clients",
            "86.7; FedAvg 85.7, pFedMe 83.1, Local 83.8",
            "",
            nine("two classes, 50", "pFedMB", "FedAvg", "pFedMe", "Local"),
            "does not appear at this scale: training alone is best",
        ],
        [
            "MetaVD",
            "X + MetaVD gains accuracy on X (Reptile)",
            "gains throughout",
            "",
            f"{metavd('accuracy', 'overfit')}; underfit {metavd('accuracy', 'underfit')}",
            "does not appear: a loss where models underfit",
        ],
        [
            "",
            "more on clients that never trained",
            "larger gain",
            "",
            metavd("accuracy", "overfit", "held_out"),
            "does not appear: below X on all three seeds",
        ],
        [
            "",
            "it is better calibrated (ECE)",
            "lower",
            "",
            f"{metavd('ece', 'overfit')}; underfit {metavd('ece', 'underfit')}",
            "appears where clients overfit, by draws; stopping early does most of it (one seed)",
        ],
        [
            "",
            "a hypernetwork is better than one s, or one for each client (NLL)",
            "VD, EnsembleVD below MetaVD",
            "",
            "; ".join(
                f"{m[2:]} {at_forty('nll', m, 1)}" for m in ("X+VD", "X+EnsembleVD", "X+MetaVD")
            ),
            "appears: rates of these two do not run away",
        ],
        [
            "",
            "70% of weights can be dropped",
            "about 70%",
            "",
            spread(kept("metavd/pull.csv", "rates_above_0.9", weights="8192", round="20"), ".0f"),
            "appears without any data: the divergence alone does it",
        ],
        [
            "",
            "and accuracy stays, with 70% dropped",
            "within a point",
            "",
            "; ".join(
                f"{m} {at_forty('accuracy', m)}" for m in ("X+MetaVD, pruned", "X, SNIP", "X")
            ),
            "appears, for SNIP as well",
        ],
        [
            "FedBE",
            "students are above FedAvg (CIFAR-10, step), v-Distillation's below",
            "+2.5; -2.8",
            "",
            f"MLP {image('defaults')}; {image('v-Distillation')}; ConvNet, 8 rounds "
            f"{image('defaults', 'convnet_longer')}; {image('v-Distillation', 'convnet_longer')}",
            "does not appear with few rows: the ensemble is no better than the average",
        ],
        [
            "",
            "the student gains on the average (digits)",
            "+2.5 (ConvNet), +7.3 (ResNet-20)",
            "",
            student(setting="defaults", **step),
            "appears; squared probabilities " + student(setting="squared", **step),
        ],
        [
            "",
            "Gaussian samples make better teachers",
            "+1.5 (ConvNet), +2.1 (ResNet-20)",
            "",
            student(setting="teachers=AC", **step) + " without",
            "does not appear",
        ],
        [
            "",
            "an ensemble of mixtures beats FedAvg (figure 1)",
            "+5, one roll",
            "",
            spread(coin, "+.1f") + ", fifty rolls",
            "under conditions: at small rates, by two standard errors",
        ],
    ]
    new = by(read(HERE / "fedabml/new_clients.csv"), "method")

    def ahead(epochs: str, than: str) -> str:
        of = [line for line in new["FedABML, 5 steps a batch"] if line["epochs"] == epochs]
        plain = [line for line in new["FedAvg+FT"] if line["epochs"] == than]
        return spread(gains(of, plain, "accuracy"), "+.1f")

    rows += [
        [
            "FedABML",
            "new clients learn faster than by FedAvg, F = 1 and 10",
            "+1.9 and +4.8",
            "",
            f"{ahead('1', '1')} and {ahead('10', '10')}",
            "appears, with five times the steps",
        ],
        [
            "",
            "the same at equal numbers of steps, 5 and 10 passes",
            "not tried",
            "",
            f"{ahead('1', '5')} and {ahead('2', '10')}",
            "does not appear",
        ],
    ]
    rows.append(
        [
            "",
            "entropy tells strange rows from known ones (figure 5), AUROC",
            "a figure, no number",
            "",
            "; ".join(
                f"{name} {spread(kept('fedabml/entropy.csv', 'auroc', method=name))}"
                for name in ("FedABML", "FedAvg, fine-tuned")
            ),
            "appears, without a posterior as well",
        ]
    )
    head = ["paper", "claim", "paper's", "authors' code", "here", "does it appear?"]
    return markdown(head, rows)
