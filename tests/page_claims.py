"""What numbers on pages must be, from code and stored tables; see test_page_numbers.py."""

from __future__ import annotations

import csv
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import promises
import test_contract
from regression_problems import PROBLEMS

from pyrofl import datasets
from pyrofl.choices import MIN_SCORED_ROWS
from pyrofl.data.loaders.csv_files import load_csv as tables_of
from pyrofl.data.tables import row_checks
from pyrofl.experiments.methods import builds
from pyrofl.flower import coordinator
from pyrofl.inference import fit, planning
from pyrofl.inference.monitoring import status
from pyrofl.inference.posteriors import corrected, importance_sampling
from pyrofl.inference.reference import samplers
from pyrofl.inference.training import noise
from pyrofl.inference.tuning import studies
from pyrofl.models import two_stage

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAPERS = EXAMPLES / "papers"
TESTS = Path(__file__).parent
sys.path += map(str, (PAPERS / "parity", PAPERS, TESTS / "inference" / "acceleration"))

import others  # noqa: E402
import settings  # noqa: E402
import test_waiting  # noqa: E402

TENS = ("", "ten", "twenty", "thirty", "forty", "fifty")
WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
WORDS += " fifteen sixteen seventeen eighteen nineteen"
IN_WORDS = {word: n for n, word in enumerate(WORDS.split())}
IN_WORDS |= {word: 10 * n for n, word in enumerate(TENS) if word} | {"fifth": 5}
N = r"([\d,]*\.?\d+)"  # a number; a word is written out in a pattern


class Claim(NamedTuple):
    """Numbers of a page, the groups of a pattern, and what they must be."""

    page: str
    pattern: str
    expected: Callable[[], Iterable[float]]


def value(text: str) -> tuple[float, float]:
    """Return a number that is written on a page, and half a unit of its last digit."""
    if (word := text.lower()) in IN_WORDS:
        return IN_WORDS[word], 0.5
    digits = text.replace(",", "")
    return float(digits), 0.5 * 10.0 ** -len(digits.partition(".")[2])


@cache
def read(name: str) -> list[dict[str, str]]:
    """Return the lines of a CSV file in examples/."""
    with (EXAMPLES / name).open(newline="") as file:
        return list(csv.DictReader(file))


def column(name: str, which: str, scale: float = 1, **where: str) -> list[float]:
    """Return a column of the lines of a file that have these values."""
    lines = [line for line in read(name) if all(line[n] == v for n, v in where.items())]
    return [scale * float(line[which]) for line in lines if line[which]]


def ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest value."""
    some = [*values]
    return min(some), max(some)


def default(function: Callable[..., Any], name: str) -> Any:
    """Return the default of an argument."""
    return inspect.signature(function).parameters[name].default


# What there is.


def methods() -> list[float]:
    return [len(builds())]


def lessons() -> list[float]:
    return [len([*(EXAMPLES / "tutorials").glob("[0-9]*.py")])]


def minutes() -> list[float]:
    """Return the minutes that the lessons say they take."""
    texts = (path.read_text() for path in (EXAMPLES / "tutorials").glob("[0-9]*.py"))
    return [float(n) for text in texts for n in re.findall(r"lesson \(about (\d+) minutes", text)]


def problems() -> list[float]:
    return [len([*(EXAMPLES / "posteriors" / "problems").glob("*.json")])]


def checks() -> list[float]:
    """Count the checks of all methods: all, those of a new method, others, and typical methods."""
    text = Path(test_contract.__file__).read_text(encoding="utf-8")
    every, typical = (
        len(re.findall(rf"(?m)^@{n}$", text)) for n in ("everywhere", "on_archetypes")
    )
    return [every + typical, every, typical, len(promises.ARCHETYPES)]


# pFedVEM.

VEM, CHOSEN = "papers/pfedvem/table.csv", "papers/pfedvem/chosen.csv"
TABLE = EXAMPLES / "pfedvem_table.py"
CLIENTS = ("50", "100", "200")


def vem(method: str, clients: str, which: str = "personal", file: str = VEM) -> float:
    """Return a mean accuracy of pFedVEM's table in percent."""
    return mean(column(file, which, 100, method=method, clients=clients))


def above(one: str, other: str, which: str = "personal", file: str = VEM) -> list[float]:
    """Return by how many points a method is above another, with 50, 100 and 200 clients."""
    known = [n for n in CLIENTS if column(file, which, clients=n, method=one)]
    return [vem(one, n, which, file) - vem(other, n, which, file) for n in known]


def paper(one: str, other: str) -> list[float]:
    """Return the same for the personal models of the paper."""
    of = {
        (x["case"].removesuffix(" clients"), x["row"]): x["value"]
        for x in read("papers/pfedvem/paper.csv")
        if (x["study"], x["metric"]) == ("table1_fashion", "personal")
    }
    first, second = ([float(of[n, m].split()[0]) for n in CLIENTS] for m in (one, other))
    return [a - b for a, b in zip(first, second, strict=True)]


def small(one: str, other: str) -> float:
    return vem(one, "100", "smallest") - vem(other, "100", "smallest")


def without(term: str, which: str) -> float:
    return vem("pFedVEM", "100", which) - vem(f"pFedVEM, {term} only", "100", which)


def of_the_tuning() -> list[float]:
    """Count the methods of table 1 with the settings of the tuning, all, and those with others."""
    names = [name for name in settings.used(TABLE) if "only" not in name]  # no ablations
    other = sum(name in settings.differences(TABLE) for name in names)
    return [len(names) - other, len(names), other]


@cache
def parity() -> dict[tuple[str, str], list[others.Compared]]:
    """Return the comparison with other code: method, model -> rounds."""
    found: dict[tuple[str, str], list[others.Compared]] = {}
    for row in others.compared(others.read(PAPERS / "parity" / "found.csv")):
        found.setdefault((row.method, row.model), []).append(row)
    return found


def bound(model: str) -> float:
    return 100 * parity()["pfedvem", model][0].bound


# Scores of all methods.

TUNED = "papers/tuned/scores.csv"
CIFAR = "papers/tuned/cifar10/scores.csv"


def scores(
    file: str, metric: str, *names: str, scale: float = 1, model: str = "global"
) -> list[float]:
    """Return the mean of a metric over seeds, of each method."""
    how = {"model": model, "adaptation": "none", "metric": metric}
    return [mean(column(file, "value", scale, method=name, **how)) for name in names]


def of_method(file: str, name: str) -> list[float]:
    """Return accuracy in percent, NLL and ECE of a global model."""
    return [
        scores(file, m, name, scale=100 if m == "accuracy" else 1)[0]
        for m in ("accuracy", "nll", "ece")
    ]


def bins(method: str) -> float:
    """Return the calibration error over all test rows, from the bins of the reliability diagram."""
    total: dict[str, list[float]] = {}
    for line in read("papers/tuned/reliability.csv"):
        if line["method"] == method and (rows := float(line["rows"])):
            known = total.setdefault(line["bin"], [0.0, 0.0])
            known[0] += rows
            known[1] += rows * (float(line["confidence"]) - float(line["accuracy"]))
    return sum(abs(gap) for _, gap in total.values()) / sum(rows for rows, _ in total.values())


# Other papers.


def passes(method: str, at: int, by: str = "steps") -> float:
    """Return the accuracy of new clients in percent, after passes over their rows, or epochs."""
    return mean(
        100 * float(line["accuracy"])
        for line in read("papers/fedabml/new_clients.csv")
        if line["method"] == method
        and int(line["epochs"]) * (int(line["steps"]) if by == "steps" else 1) == at
    )


def metavd(
    metric: str, file: str = "overfit", at: str = "40", of: str = "training"
) -> list[list[float]]:
    """Return a score of X, and of X + MetaVD with draws, for each seed."""
    how = {"metric": metric, "round": at, "population": of}
    scale = 1 if metric == "nll" else 100
    return [
        column(f"papers/metavd/{file}.csv", "value", scale, method=name, by=by, **how)
        for name, by in (("X", "mean"), ("X+MetaVD", "draws"))
    ]


def gained(*more: str) -> tuple[float, float]:
    """Return the change of accuracy by MetaVD, and its standard error."""
    change = [b - a for a, b in zip(*metavd("accuracy", *more), strict=True)]
    return mean(change), stdev(change) / len(change) ** 0.5


def before(method: str, column_of: str) -> float:
    """Return the accuracy before fine-tuning in pFedMB's table II, at the chosen rate."""
    lines = [
        x
        for x in read("papers/pfedmb/others.csv")
        if (x["column"], x["method"]) == (column_of, method)
    ]
    of = {rate: [x for x in lines if x["rate"] == rate] for rate in {x["rate"] for x in lines}}
    best = max(of.values(), key=lambda some: mean(float(x["tuning"]) for x in some))
    return 100 * mean(float(x["before"]) for x in best)


def rolls(which: Callable[[list[float]], float]) -> list[float]:
    """Return a statistic of FedBE's gains over the rolls of the smallest two learning rates."""
    found = []
    for lr in ("0.001", "0.002"):
        lines = [x for x in read("papers/fedbe/swiss_roll.csv") if x["lr"] == lr]
        found.append(which([float(x["ensemble"]) - float(x["fedavg"]) for x in lines]))
    return found


# Other tables.


def sets(which: str) -> list[float]:
    return [float(line[which]) for line in read("conformal.csv")]


def rounds(*wanted: int) -> list[str]:
    """Return the problems that likelihood factors fit in these numbers of rounds, by default."""
    found = []
    for line in read("posteriors/results.csv"):
        if line["method"] == "default" and not line["rounds"]:
            number = int(line["exchanges"]) - (line["exchanges"] != "1")  # one corrects the draws
            found += [line["problem"]] * (number in wanted)
    return found


PFEDVEM, CONFORMAL = "examples/papers/pfedvem/README.md", "examples/docs/conformal.md"
ABML, MB = "examples/papers/fedabml/README.md", "examples/papers/pfedmb/README.md"
VD, BE = "examples/papers/metavd/README.md", "examples/papers/fedbe/README.md"
NUMBERS = "examples/NUMBERS.md"
HIERARCHICAL, START = "examples/docs/hierarchical.md", "examples/docs/start.md"
POSTERIORS = "examples/posteriors/words.md"
GUARANTEES, FLOWER = "examples/docs/guarantees.md", "examples/docs/flower.md"

CLAIMS = [
    # counts
    Claim("README.md", rf"\*\*{N} methods, one interface", methods),
    Claim("README.md", r"(\w+) lessons with figures", lessons),
    Claim("README.md", rf"federated posteriors\]\(\S+\): {N} problems with references", problems),
    Claim(
        "README.md", rf"after {N} rounds; each class is split among {N} clients", lambda: [18, 100]
    ),
    Claim(
        "README.md",
        r"best of (\w+) settings",
        lambda: {*column("papers/tuned/budget.csv", "settings")},
    ),
    Claim("examples/docs/index.md", rf"one of {N} methods", methods),
    Claim("examples/docs/index.md", r"with (\w+) lessons", lessons),
    Claim("examples/docs/tutorials.md", r"These (\w+) tutorials", lessons),
    Claim("examples/docs/comparison.md", rf"\| methods \| {N}, about half", methods),
    Claim("examples/docs/own_method.md", rf"has {N} checks of all methods", lambda: checks()[:1]),
    Claim(
        "examples/docs/own_method.md",
        rf"runs {N} of them on a new method; the other {N} run on (\w+) typical",
        lambda: checks()[1:],
    ),
    Claim(HIERARCHICAL, rf"all {N} problems of the", problems),
    Claim("examples/docs/howto.md", r"(\w+) regressions compared", lambda: [12]),
    # pFedVEM
    Claim(
        PFEDVEM,
        rf"They are {N}, {N} and {N} points above FedPer with 50, 100 and 200 clients",
        lambda: above("pFedVEM", "FedPer"),
    ),
    Claim(PFEDVEM, rf"\(paper: {N}, {N} and {N}\)", lambda: paper("pFedVEM", "FedPer")),
    Claim(
        PFEDVEM,
        rf"and {N} to {N} points above local training",
        lambda: ends(above("pFedVEM", "Local")),
    ),
    Claim(
        PFEDVEM, rf"local training \(paper: {N} to {N}\)", lambda: ends(paper("pFedVEM", "Local"))
    ),
    Claim(PFEDVEM, r"(\w+) times fewer rows", lambda: [60_000 / int(read(VEM)[0]["rows"])]),
    Claim(
        PFEDVEM,
        rf"pFedVEM is {N} points above pFedMe with 50 clients and {N} below with 100",
        lambda: [abs(v) for v in above("pFedVEM", "pFedMe")[:2]],
    ),
    Claim(
        PFEDVEM,
        rf"pFedMe is {N} points above pFedVEM, and its global model {N} points",
        lambda: [above("pFedMe", "pFedVEM", which)[2] for which in ("personal", "global")],
    ),
    Claim(
        PFEDVEM,
        rf"is {N} to {N} points below, with one epoch",
        lambda: ends(above("pFedVEM", "pFedBayes")),
    ),
    Claim(
        PFEDVEM,
        rf"fails on one seed of three \({N}; {N} and {N}\)",
        lambda: sorted(column(VEM, "personal", 100, method="Per-FedAvg", clients="50")),
    ),
    Claim(
        PFEDVEM,
        rf"personal models lose {N} points \(paper: 1.0\), and {N} on small",
        lambda: [without("deviation", which) for which in ("personal", "smallest")],
    ),
    Claim(
        PFEDVEM,
        rf"federation, {N} points compared with local training; all clients together gain {N}",
        lambda: [small("pFedVEM", "Local"), above("pFedVEM", "Local")[1]],
    ),
    Claim(
        PFEDVEM,
        rf"on them \({N} compared with {N}\), and FedPer is equal \({N}\)",
        lambda: [vem(m, "100", "smallest") for m in ("pFedMe", "pFedVEM", "FedPer")],
    ),
    Claim(
        PFEDVEM,
        rf"FedRep has {N} instead of {N} with 50 clients and {N} instead of {N} with 100, "
        rf"which is {N} and {N} points below FedPer",
        lambda: [
            *(vem("FedRep", n, file=name) for n in ("50", "100") for name in (CHOSEN, VEM)),
            *above("FedPer", "FedRep", file=CHOSEN)[:2],
        ],
    ),
    Claim(
        PFEDVEM,
        rf"pFedVEM is then {N} points above FedPer with 50 clients and {N} with 100",
        lambda: above("pFedVEM", "FedPer", file=CHOSEN)[:2],
    ),
    Claim(PFEDVEM, rf"is {N} to {N} points below\. This", lambda: ends(above("FedPer", "FedRep"))),
    Claim(
        PFEDVEM,
        r"(\w+) of the (\w+) methods of table 1 have these settings; (\w+) have others",
        of_the_tuning,
    ),
    Claim(
        PFEDVEM,
        rf"at most {N} points \(personal\) and {N} \(global\)",
        lambda: [bound("personal"), bound("global")],
    ),
    Claim(PFEDVEM, rf"A bound of {N} points", lambda: [bound("global")]),
    Claim(PFEDVEM, rf"over these rounds must be at most {N} points", lambda: [100 * others.WITHIN]),
    Claim(
        PFEDVEM,
        rf"at rounds {N}, {N}, {N}, {N} and {N}\.",
        lambda: [*others.CASES["pfedvem"].theirs["personal"]],
    ),
    Claim(
        PFEDVEM,
        rf"accuracies of {N} \(personal\) and {N} \(global\) after 21 rounds",
        lambda: [100 * others.CASES["pfedvem"].theirs[m][21] for m in ("personal", "global")],
    ),
    # numbers of all methods
    Claim(
        NUMBERS,
        rf"more accurate than FedAvg \({N}, {N} and {N} against {N} percent\)",
        lambda: scores(TUNED, "accuracy", "pvi", "fedgvi", "fedlap", "fedavg", scale=100),
    ),
    Claim(
        NUMBERS,
        rf"smaller NLL \({N}, {N} and {N} against {N}\) "
        rf"and a smaller ECE \({N}, {N} and {N} against {N}\)",
        lambda: [
            *scores(TUNED, "nll", "pvi", "fedgvi", "fedlap", "fedavg"),
            *scores(TUNED, "ece", "pvi", "fedgvi", "fedlap", "fedavg"),
        ],
    ),
    Claim(
        NUMBERS,
        rf"a larger ECE \({N}\) than FedAvg \({N}\), and FedLap a smaller one \({N}\)",
        lambda: [bins(m) for m in ("pvi", "fedavg", "fedlap")],
    ),
    Claim(
        NUMBERS,
        rf"as accurate as FedAvg \({N} against {N} percent\) "
        rf"with a smaller NLL \({N} against {N}\)",
        lambda: [
            *scores(CIFAR, "accuracy", "pvi", "fedavg", scale=100),
            *scores(CIFAR, "nll", "pvi", "fedavg"),
        ],
    ),
    Claim(
        NUMBERS,
        rf"a smaller ECE \({N} against {N}; over",
        lambda: scores(CIFAR, "ece", "pvi", "fedavg"),
    ),
    Claim(
        NUMBERS,
        rf"SCAFFOLD is better than both \({N} percent, {N}, {N}\)",
        lambda: of_method(CIFAR, "scaffold"),
    ),
    Claim(NUMBERS, rf"The NLL of FedIVON is {N}\.", lambda: scores(CIFAR, "nll", "fedivon")),
    Claim(
        NUMBERS,
        rf"less accurate \({N} percent\), with an NLL of {N} and an ECE of {N}",
        lambda: of_method(CIFAR, "fedgvi"),
    ),
    Claim(
        NUMBERS,
        rf"FedLap is more accurate \({N} percent\)",
        lambda: scores(CIFAR, "accuracy", "fedlap", scale=100),
    ),
    Claim(
        NUMBERS,
        rf"corrections of LR-BPFL \({N} percent\)",
        lambda: scores(CIFAR, "accuracy", "lrbpfl", scale=100, model="personal"),
    ),
    # prediction sets
    Claim(
        NUMBERS,
        rf"of the clients is {N} to {N} for the {N} methods, with a standard error of {N}",
        lambda: [*ends(sets("coverage")), len(sets("coverage")), median(sets("error"))],
    ),
    Claim(
        NUMBERS,
        rf"Of the {N} coverages of single clients {N} are in their 95% range",
        lambda: [sum(sets("clients")), sum(sets("in_range"))],
    ),
    Claim(
        NUMBERS,
        rf"corrected for its {N} clients, is {N}",
        lambda: [max(sets("clients")), min(sets("p"))],
    ),
    Claim(NUMBERS, rf"have {N} to {N} classes on average", lambda: ends(sets("size"))),
    Claim(NUMBERS, rf"at a client is {N} to {N}\.", lambda: ends(sets("pooled_lowest"))),
    Claim(NUMBERS, rf"mean coverage of {N} to {N}, and", lambda: ends(sets("uncalibrated"))),
    Claim(
        NUMBERS, rf"and {N} to {N} at the worst client", lambda: ends(sets("uncalibrated_lowest"))
    ),
    Claim(CONFORMAL, rf"with {N} to {N} classes on average", lambda: ends(sets("size"))),
    Claim(CONFORMAL, rf"at a client is {N} to {N}\.", lambda: ends(sets("pooled_lowest"))),
    Claim(CONFORMAL, rf"mean coverage of {N} to {N}\.", lambda: ends(sets("uncalibrated"))),
    Claim(CONFORMAL, rf"sets of {N} methods have the stated", lambda: [len(sets("coverage"))]),
    # hierarchical models
    Claim(POSTERIORS, rf"likelihood factors \| 1 \| {N} linear", lambda: [len(rounds(1))]),
    Claim(POSTERIORS, rf"likelihood factors \| 2 \| {N},", lambda: [len(rounds(2))]),
    Claim(
        POSTERIORS,
        rf"likelihood factors \| {N} to {N} \| {N}: {N} to {N}; `sleepstudy_gamma`: {N}; "
        rf"kidney: {N}; [^|]*?posterior: {N} ",
        lambda: [
            *planning.UNDAMPED_ROUNDS,
            len(rounds(*range(3, 10))),
            *(n for n in (3, 8) if rounds(n) and not rounds(9)),
            *(
                n
                for n in (10, 11, 62)
                if rounds(n) in (["sleepstudy_gamma"], ["kidney"], ["banana"])
            ),
        ],
    ),
    Claim(POSTERIORS, rf"PVI \| {N} to {N} \| 9", lambda: planning.DAMPED_ROUNDS),
    Claim(HIERARCHICAL, rf"after at most {N} rounds; `rounds", lambda: [fit.MAX_ROUNDS]),
    Claim(START, rf"after at most {N} rounds", lambda: [fit.MAX_ROUNDS]),
    Claim(
        START,
        rf"most {N} of the site's standard",
        lambda: [status.MAX_REMAINING_CHANGE * status.CONVERGED_CHANGES["mean"]],
    ),
    Claim(
        HIERARCHICAL,
        rf"factors \| {N} standard deviations in the last [^|]*"
        rf"\|\n\| PVI \| {N} standard deviations in each of the last (\w+) rounds",
        lambda: [
            status.MAX_REMAINING_CHANGE * status.CONVERGED_CHANGES["mean"],
            status.CONVERGED_CHANGES["mean"],
            status.MAX_AGGREGATIONS,
        ],
    ),
    Claim(HIERARCHICAL, rf"\(below {N} is good\)", lambda: [importance_sampling.MAX_RELIABLE_K]),
    Claim(
        "README.md", rf"\(values below {N} are good\)", lambda: [importance_sampling.MAX_RELIABLE_K]
    ),
    # guarantees and limits
    Claim(
        GUARANTEES,
        rf"in each of the last (\w+) server updates, [^;]*? at most {N} of the",
        lambda: [status.MAX_AGGREGATIONS, status.CONVERGED_CHANGES["mean"]],
    ),
    Claim(
        GUARANTEES,
        rf"updates is also at most {N} standard",
        lambda: [status.MAX_REMAINING_CHANGE * status.CONVERGED_CHANGES["mean"]],
    ),
    Claim(
        GUARANTEES,
        rf"sends {N} posterior draws by default",
        lambda: [default(two_stage.hierarchical, "draws")],
    ),
    Claim(FLOWER, r"of clients with fewer than (\w+) test rows", lambda: [MIN_SCORED_ROWS]),
    Claim(
        FLOWER,
        rf"for each of {N} to {N} draws",
        lambda: [1.25 * corrected.MIN_SHARED_DRAWS, importance_sampling.MAX_TRIED],
    ),
    Claim("examples/docs/scripts.md", r"best (\w+) are trained", lambda: [studies.FINALISTS]),
    # other papers
    Claim(
        ABML,
        rf"by {N} points after one epoch, {N} after two and {N} after ten",
        lambda: [
            passes("FedABML, 5 steps a batch", at, "epochs") - passes("FedAvg+FT", at, "epochs")
            for at in (1, 2, 10)
        ],
    ),
    Claim(
        ABML,
        rf"by {N} points after five passes and {N} to {N} after ten",
        lambda: [
            passes("FedAvg+FT", 5) - passes("FedABML", 5),
            *(passes("FedAvg+FT", 10) - passes(n, 10) for n in ("FedABML", "FedABML, k = 1")),
        ],
    ),
    Claim(
        VD,
        rf"NLL decreases from {N} to {N} and ECE from {N} to {N} on all three",
        lambda: map(mean, [*metavd("nll"), *metavd("ece")]),
    ),
    Claim(
        VD,
        rf"held-out clients \({N} to {N}, {N} to {N}\)",
        lambda: map(mean, [*metavd("nll", of="held_out"), *metavd("ece", of="held_out")]),
    ),
    Claim(
        VD,
        rf"NLL is still lower \({N} compared with {N}, one seed\)",
        lambda: map(mean, reversed(metavd("nll", at="60"))),
    ),
    Claim(
        VD,
        rf"before it overfits, has {N} and {N} \(one seed\)",
        lambda: [mean(metavd(metric, at="10")[0]) for metric in ("nll", "ece")],
    ),
    Claim(
        VD,
        rf"it changes by -{N} ± {N} points",
        lambda: [-gained()[0], gained()[1]],
    ),
    Claim(
        VD,
        rf"on held-out clients by -{N} ± {N}, below X",
        lambda: [-gained("overfit", "40", "held_out")[0], gained("overfit", "40", "held_out")[1]],
    ),
    Claim(
        VD,
        rf"accuracy is lower by {N} ± {N} points, on held-out clients by {N} ± {N},",
        lambda: [
            abs(number)
            for of in ("training", "held_out")
            for number in gained("underfit", "40", of)
        ],
    ),
    Claim(
        MB,
        rf"\({N} compared with {N}; with two classes and fifty clients {N} compared with {N}\)",
        lambda: [
            before(m, where)
            for where in ("Dirichlet, 15", "two classes, 50")
            for m in ("pFedMB", "FedAvg")
        ],
    ),
    Claim(
        BE,
        rf"on {N} and {N} of fifty rolls",
        lambda: rolls(lambda gains: sum(g > 0 for g in gains)),
    ),
    Claim(
        "examples/papers/parity/README.md",
        rf"by more than {N} points on average",
        lambda: [100 * others.WITHIN],
    ),
    Claim(
        "examples/papers/parity/README.md",
        rf"{N} points at round 5, is two standard errors, and {N} on average",
        lambda: [
            -100 * parity()["perfedavg", "personal"][0].difference,
            -100 * mean(row.difference for row in parity()["perfedavg", "personal"]),
        ],
    ),
    # what is measured of all methods, and defaults
    Claim(
        "examples/docs/devices.md",
        rf"runs {N} methods on the CPU",
        lambda: [len(test_waiting.METHODS) + len(test_waiting.ASKED)],
    ),
    Claim(
        "examples/docs/devices.md", rf"is none in {N} of them", lambda: [len(test_waiting.METHODS)]
    ),
    Claim(
        "examples/docs/devices.md", rf"up to {N} numbers of a client", lambda: [noise.NUMBERS_AHEAD]
    ),
    Claim(
        "examples/CALIBRATION.md",
        rf"labels of {N} handwritten digits",
        lambda: [len(datasets.load("digits").x)],
    ),
    Claim(
        "examples/docs/own_tables.md",
        rf"more than {N} standard deviations from the mean",
        lambda: [row_checks.MAX_DEVIATIONS],
    ),
    Claim(
        HIERARCHICAL, rf"Monte Carlo, with {N} chains", lambda: [default(samplers.hmc, "chains")]
    ),
    Claim(
        "examples/docs/own_tables.md",
        r"a random (\w+) of each client's rows are test rows",
        lambda: [round(1 / default(tables_of, "test_fraction"))],
    ),
    Claim(FLOWER, r"is repeated, up to (\w+) times", lambda: [coordinator.MAX_ROUND_REPEATS]),
    Claim("examples/docs/tutorials.md", rf"Each takes {N} to {N} minutes", lambda: ends(minutes())),
    Claim(
        "examples/docs/regression.md",
        rf"compare {N} regressions of {N} families",
        lambda: [
            len(PROBLEMS),
            len({how.get("family", "gaussian") for _, how in PROBLEMS.values()}),
        ],
    ),
    Claim(
        "examples/docs/what_leaves_a_client.md",
        r"with fewer than (\w+) test rows",
        lambda: [MIN_SCORED_ROWS],
    ),
    Claim(
        "examples/docs/what_leaves_a_client.md",
        rf"at up to {N} draws of the shared",
        lambda: [importance_sampling.MAX_TRIED],
    ),
]
