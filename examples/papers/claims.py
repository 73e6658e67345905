"""Claims of the papers and whether they are reproduced: the first table of the first page."""

from statistics import mean

from files import HERE, Lines, best, by, finished, gains, kept, markdown, numbers, read, spread


def hundred() -> dict[str, Lines]:
    """Return pFedVEM's table of 100 clients by method."""
    lines = [line for line in read(HERE / "pfedvem/table.csv") if line["clients"] == "100"]
    return finished(lines, "method")


def hundred_by(column: str, *methods: str) -> str:
    """Return one column of pFedVEM's table of 100 clients as text."""
    of = hundred()
    return "; ".join(f"{m} {spread(numbers(of[m], column, 100))}" for m in methods)


def at_forty(
    metric: str,
    method: str,
    scale: float = 100,
    file: str = "overfit",
    population: str = "training",
) -> str:
    """Return a score of MetaVD's page at round 40, with ten draws if the method is Bayesian."""
    return spread(at_40(metric, method, scale, file, population), ".3g", ".2g")


def at_40(metric: str, method: str, scale: float, file: str, population: str) -> list[float]:
    """Return a score of MetaVD's page at round 40 for each seed."""
    where = {"round": "40", "population": population, "by": "draws" if "VD" in method else "mean"}
    return kept(f"metavd/{file}.csv", "value", scale, metric=metric, method=method, **where)


def metavd(metric: str, file: str, population: str = "training") -> str:
    """Return the change from X to X + MetaVD at round 40, paired by seed."""
    of, plain = (at_40(metric, method, 100, file, population) for method in ("X+MetaVD", "X"))
    change = spread([a - b for a, b in zip(of, plain, strict=True)], "+.1f")
    return f"{change} (X: {mean(plain):.1f})"


def above_fedavg(of: Lines, than: Lines) -> list[float]:
    """Return the difference between the student and FedAvg's average for each seed."""
    fedavg = {line["seed"]: float(line["average"]) for line in than}
    return [float(line["student"]) - fedavg[line["seed"]] for line in of]


def claims() -> str:
    """Return the table of claims: results of the paper, the authors' code and pyrofl."""

    def digits(setting: str, than: str) -> str:
        where = {"partition": "step:2,minor=2"}
        one = kept("fedbe/students.csv", "student", 1, setting=setting, **where)
        score = "average" if than == "FedAvg" else "student"  # FedAvg has no student
        other = kept("fedbe/students.csv", score, 1, setting=than, **where)
        return spread([a - b for a, b in zip(one, other, strict=True)], "+.1f")

    def image(setting: str, file: str = "cifar10") -> str:
        of = by(read(HERE / f"fedbe/{file}.csv"), "setting")
        return spread(above_fedavg(of[setting], of["FedAvg"]), "+.1f")

    rolls = [kept("fedbe/swiss_roll.csv", which, 1, lr="0.001") for which in ("ensemble", "fedavg")]
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
            "personal models are most accurate (100 clients)",
            "91.4; pFedMe 91.4, FedPer 90.7, Local 87.5",
            "86.1 with 5,000 rows",
            hundred_by("personal", "pFedVEM", "pFedMe", "FedPer", "Local"),
            "yes against Local, direction holds against FedPer; pFedMe is equal (as in the paper) "
            "or, with 200 clients, better",
        ],
        [
            "",
            "the global model is as accurate as FedAvg's",
            "85.6; FedAvg 85.4, FedProx 86.3",
            "80.9 with 5,000 rows",
            hundred_by("global", "pFedVEM", "FedAvg", "FedProx"),
            "direction holds: above FedAvg",
        ],
        [
            "",
            "it is most accurate on small clients (paper: CIFAR-10; here: Fashion-MNIST)",
            "70.2; pFedMe 65.0, FedPer 66.2",
            "",
            hundred_by("smallest", "pFedVEM", "pFedMe", "FedPer", "Local"),
            "no: pFedMe is best, FedPer equal; above Local, which the paper does not show",
        ],
        [
            "",
            "the uncertainty term of the confidence matters (paper: CIFAR-100, 50 clients)",
            "-1.0 without",
            "",
            lost,
            "yes",
        ],
        [
            "",
            "the deviation term of the confidence matters (paper: CIFAR-100, 50 clients)",
            "-1.1 without, -0.2 if clients are similar",
            "",
            kept_up,
            "no, with label skew",
        ],
        [
            "pFedMB",
            "five branches improve on FedAvg, both fine-tuned (table I)",
            "+1.5",
            "",
            above("5 branches"),
            "direction holds: a smaller effect",
        ],
        [
            "",
            "weighting by alpha improves on the unweighted average (table I)",
            "+0.4",
            "",
            spread(gains(five["5 branches"], five["5 branches, unweighted"], "after"), "+.2f"),
            "direction holds",
        ],
        [
            "",
            "best of nine methods (table II): Dirichlet, 15 clients",
            "73.5; FedAvg 73.5, pFedMe 72.9, Local 67.5",
            "",
            nine("Dirichlet, 15", "pFedMB", "FedAvg", "pFedMe", "Local"),
            "no, at this scale: pFedMe is best",
        ],
        [
            "",
            "best of nine methods (table II): two classes, 50 clients",
            "86.7; FedAvg 85.7, pFedMe 83.1, Local 83.8",
            "",
            nine("two classes, 50", "pFedMB", "FedAvg", "pFedMe", "Local"),
            "no, at this scale: Local is best",
        ],
        [
            "MetaVD",
            "X + MetaVD is more accurate than X (Reptile)",
            "higher in all experiments",
            "",
            f"{metavd('accuracy', 'overfit')}; underfit {metavd('accuracy', 'underfit')}",
            "no: lower if models underfit",
        ],
        [
            "",
            "the gain is larger on held-out clients",
            "larger gain",
            "",
            metavd("accuracy", "overfit", "held_out"),
            "no: below X on all three seeds",
        ],
        [
            "",
            "X + MetaVD is better calibrated than X (ECE)",
            "lower",
            "",
            f"{metavd('ece', 'overfit')}; underfit {metavd('ece', 'underfit')}",
            "yes, with posterior draws; early stopping of X has most of the effect (one seed)",
        ],
        [
            "",
            "a hypernetwork is better than one rate (VD) or one per client (EnsembleVD); accuracy",
            "MetaVD best, 53.7; held-out clients 54.5",
            "",
            "; ".join(
                f"{m[2:]} {at_forty('accuracy', m)}, "
                f"{at_forty('accuracy', m, population='held_out')}"
                for m in ("X+VD", "X+EnsembleVD", "X+MetaVD")
            ),
            "no; its likelihood is better, as only its rates diverge",
        ],
        [
            "",
            "70% of weights can be dropped",
            "about 70%",
            "",
            spread(kept("metavd/pull.csv", "rates_above_0.9", weights="8192", round="20"), ".0f"),
            "yes, even without data: the KL term alone causes it",
        ],
        [
            "",
            "accuracy is unchanged with 70% dropped",
            "about equal; the number is lost in our text of the paper",
            "",
            "; ".join(
                f"{m} {at_forty('accuracy', m)}" for m in ("X+MetaVD, pruned", "X, SNIP", "X")
            ),
            "direction holds; also with SNIP",
        ],
        [
            "FedBE",
            "FedBE is better than FedAvg, v-Distillation worse (CIFAR-10, step)",
            "+2.5; -2.8",
            "",
            f"MLP {image('distil_lr=0.01')}; {image('v-Distillation')}; ConvNet, 8 rounds "
            f"{image('distil_lr=0.01', 'convnet_longer')}; "
            f"{image('v-Distillation', 'convnet_longer')}",
            "no, with few rows: the ensemble is no better than the average",
        ],
        [
            "",
            "FedBE is better than FedAvg (digits)",
            "+2.5 (ConvNet), +7.3 (ResNet-20)",
            "",
            digits("defaults", "FedAvg"),
            "yes; with squared probabilities " + digits("squared", "FedAvg"),
        ],
        [
            "",
            "Gaussian samples improve the student",
            "+1.5 (ConvNet), +2.1 (ResNet-20)",
            "",
            digits("distil_lr=0.01", "teachers=AC"),
            "no",
        ],
        [
            "",
            "an ensemble of mixtures is better than FedAvg (figure 1)",
            "+5, one roll (FedAvg 64)",
            "",
            spread(coin, "+.1f") + f", fifty rolls (FedAvg {mean(rolls[1]):.0f})",
            "direction holds; not at larger learning rates",
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
            "new clients are more accurate than with FedAvg after F = 1 and 10 epochs",
            "+1.9 and +4.8",
            "",
            f"{ahead('1', '1')} and {ahead('10', '10')}",
            "direction holds, with five times the steps",
        ],
        [
            "",
            "the same with equal numbers of steps, 5 and 10 passes",
            "not tested",
            "",
            f"{ahead('1', '5')} and {ahead('2', '10')}",
            "no",
        ],
        [
            "",
            "closer to the exact posterior mean than FedAvg, and a lower loss after fine-tuning "
            "(figure 2)",
            "figure without numbers",
            "",
            "`fedabml_toy.py`",
            "yes, after the first rounds; no, the loss is higher",
        ],
    ]
    rows.append(
        [
            "",
            "entropy detects out-of-distribution rows (figure 5), AUROC",
            "figure without numbers",
            "",
            "; ".join(
                f"{name} {spread(kept('fedabml/entropy.csv', 'auroc', method=name))}"
                for name in ("FedABML", "FedAvg, fine-tuned")
            ),
            "yes, also without a posterior",
        ]
    )
    head = ["paper", "claim", "result of the paper", "authors' code", "pyrofl", "reproduced?"]
    return markdown(head, rows)
