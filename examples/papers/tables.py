"""Generate the tables of the pages of this folder from its CSV files, between two marks.

Run: python examples/papers/tables.py [--check]
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import import_module
from inspect import signature
from math import log10
from statistics import mean, stdev
from typing import Any

import harness
from claims import above_fedavg, claims, hundred
from commands import commands
from files import (
    HERE,
    SEEDS,
    Lines,
    best,
    by,
    finished,
    gains,
    markdown,
    numbers,
    read,
    spread,
)
from settings import differences, edges, partition_of

from pyrofl.experiments.methods import builds

MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


STUDENTS = ["setting", "average", "student", "gain", "below", "above FedAvg"]
STUDENTS += ["ensemble", "agreement"]


def students(file: str) -> str:
    """Return the gains of FedBE's student over the average of the models and over FedAvg."""
    found = by(read(HERE / "fedbe" / file), "partition").items()
    return markdown(
        ["partition", *STUDENTS], [[p, *row] for p, some in found for row in gained(some)]
    )


def convnet() -> str:
    """Return the gains of FedBE's student with a ConvNet, by rounds and unlabeled rows."""
    rows = []
    for path in sorted((HERE / "fedbe").glob("convnet*.csv")):
        lines = read(path)
        options = dict(word.split("=", 1) for word in lines[0]["settings"].split())
        unlabeled = f"{float(options['server']) * int(options['rows']):,.0f}"
        rows += [[options["rounds"], unlabeled, *row] for row in gained(lines)]
    return markdown(["rounds", "unlabeled", *STUDENTS], rows)


def gained(lines: Lines) -> Iterator[list[str]]:
    """Yield the gains of the student for every setting."""
    of = finished(lines, "setting")
    for setting, some in of.items():
        means = ("average", "student", "ensemble", "agreement")
        shown = [spread(numbers(some, name)) for name in means]
        gain = [b - a for a, b in zip(*(numbers(some, n) for n in means[:2]), strict=True)]
        after = ["", "", ""]
        if setting != "FedAvg":
            below = f"{sum(g < 0 for g in gain)} of {len(gain)}"
            above = spread(above_fedavg(some, of["FedAvg"]), "+.1f")
            after = [spread(gain, "+.1f"), below, above]
        shown[1] *= setting != "FedAvg"
        yield [setting, *shown[:2], *after, *shown[2:]]


def swiss_roll() -> str:
    """Return how often FedBE's ensemble is more accurate than FedAvg."""
    rows = []
    for lr, lines in by(read(HERE / "fedbe/swiss_roll.csv"), "lr").items():
        fedavg, ensemble, many = (
            numbers(lines, name) for name in ("fedavg", "ensemble", "best_of_100")
        )
        gain = [b - a for a, b in zip(fedavg, ensemble, strict=True)]
        wins = f"{sum(g > 0 for g in gain)} of {len(gain)}"
        shown = [*map(spread, (fedavg, ensemble, gain)), f"{stdev(gain):.1f}", wins]
        rows.append([lr, *shown, spread(many)])
    head = ["learning rate", "FedAvg", "ensemble", "gain", "sd of gain", "gain > 0"]
    return markdown([*head, "best of 100 mixtures"], rows)


def regimes(file: str) -> str:
    """Return MetaVD's scores by method and round, with the mean of the weights / ten draws."""
    rows = []
    for method, some in by(read(HERE / "metavd" / file), "method").items():
        for number, lines in by(some, "round").items():
            of: dict[tuple[str, ...], list[float]] = {}
            for line in lines:
                key = (line["population"], line["metric"], line["by"])
                scale = 1 if line["metric"] == "nll" else 100
                of.setdefault(key, []).append(scale * float(line["value"]))
            ways = ("mean", "draws") if "VD" in method else ("mean",)
            cells = [
                " / ".join(spread(of[population, metric, way], ".3g", ".2g") for way in ways)
                for population in ("training", "held_out")
                for metric in ("accuracy", "nll", "ece")
            ]
            shares = [
                of.get(("training", n, "server"), []) for n in ("rates_above_0.9", "sparsity")
            ]
            last = [spread(share, ".3g", ".2g") if any(share) else "" for share in shares]
            rows.append([method, number, str(len(by(lines, "seed"))), *cells, *last])
    head = ["accuracy", "NLL", "ECE", "held-out accuracy", "NLL", "ECE"]
    return markdown(["method", "round", "seeds", *head, "rates > 0.9", "pruned"], rows)


def pull() -> str:
    """Return MetaVD's percentage of dropout rates above 0.9 by round, means over seeds."""
    lines, rounds = read(HERE / "metavd/pull.csv"), ("3", "5", "6", "8", "10", "12", "15", "20")
    rows = []
    for d, some in by(lines, "weights").items():
        of = by(some, "round")
        share = [f"{mean(numbers(of[r], 'rates_above_0.9', 100)):.0f}" for r in rounds]
        rows.append([f"{int(d):,}", *share])
    return markdown(["weights", *(f"round {r}" for r in rounds)], rows)


def federations() -> str:
    """Return pFedVEM's table 1 and that of the paper, for numbers of clients with all methods."""
    paper: dict[tuple[str, str], dict[str, str]] = {}
    for line in read(HERE / "pfedvem/paper.csv"):
        if line["study"] == "table1_fashion":
            at = (line["case"].removesuffix(" clients"), line["row"])
            paper.setdefault(at, {"personal": "", "global": ""})[line["metric"]] = line["value"]
    rows = []
    for clients, some in sorted(by(read(HERE / "pfedvem/table.csv"), "clients").items()):
        of = finished(some, "method")
        named = [method for at, method in paper if at == clients]
        if not {"Local", "FedAvg", "FedPer", "pFedVEM"} <= of.keys():
            continue
        for method in (m for m in named if m in of):
            theirs = paper[clients, method]
            cells = []
            for which in ("personal", "global"):
                cells += [theirs[which], spread(numbers(of[method], which, 100))]
            rows.append([clients, method, *cells])
    head = ["clients", "method", "personal: paper", "ours", "global: paper", "ours"]
    return markdown(head, sorted(rows, key=lambda row: int(row[0])))


def settings() -> str:
    """Return the settings of pFedVEM's table that are not those chosen by the tuning."""

    def shown(values: dict[str, Any], place: int) -> str:
        return ", ".join(f"{name} {both[place]}" for name, both in values.items())

    script = HERE.parent / "pfedvem_table.py"
    found = {n: v for n, v in differences(script).items() if "only" not in n}  # no ablations
    rows = [[name, shown(values, 0), shown(values, 1)] for name, values in found.items()]
    return markdown(["method", "in table 1", "chosen"], rows)


def at_chosen() -> str:
    """Return accuracies at the settings of table 1, and at those chosen by the tuning."""
    files = [by(read(HERE / "pfedvem" / name), "clients") for name in ("table.csv", "chosen.csv")]
    rows = []
    for clients in sorted(files[1], key=int):
        here, chosen = (finished(of[clients], "method") for of in files)
        for method in chosen:
            cells = [
                spread(numbers(of[method], which, 100))
                for which in ("personal", "smallest", "global")
                for of in (here, chosen)
            ]
            rows.append([clients, method, *cells])
    kinds = [word for name in ("personal", "smallest tenth", "global") for word in (name, "chosen")]
    return markdown(["clients", "method", *kinds], rows)


def rounding() -> str:
    """Return FedRep's accuracies with clients in chunks of two sizes, and their differences."""
    rows = []
    for rate, lines in by(read(HERE / "pfedvem/rounding.csv"), "lr").items():
        sizes = by(lines, "chunk_size")
        of = [numbers(some, "personal") for some in sizes.values()]
        apart = ", ".join(f"{b - a:+.2f}" for a, b in zip(*of, strict=True))
        rows.append([rate, *map(spread, of), apart])
    head = [f"chunks of {size}" for size in sizes]
    return markdown(["learning rate", *head, "differences of the seeds"], rows)


SETS = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def statistics() -> str:
    """Return the spread of pFedVEM's confidences and its deviations for each data set."""
    lines = by(read(HERE / "pfedvem/clients.csv"), "figure")["10"]
    rows = []
    for data, some in by(lines, "data").items():
        seeds = by(some, "seed").values()
        tau = [stdev(numbers(of, "tau")) for of in seeds]
        logs = [[log10(value) for value in numbers(of, "deviation")] for of in seeds]
        means = [mean(numbers(of, "deviation")) for of in seeds]
        cells = spread(tau, ".2f"), spread(means, ".2g"), spread([*map(stdev, logs)], ".2f")
        rows.append([SETS[data], str(len(by(some, "client"))), *cells])
    head = ["data", "clients", "sd of confidence / mean", "mean deviation"]
    return markdown([*head, "sd of log10 deviation"], rows)


def ablations() -> str:
    """Return the ablations of the two terms of pFedVEM's confidence."""
    of = hundred()
    full, rows = of["pFedVEM"], []
    for name in ("pFedVEM", "pFedVEM, uncertainty only", "pFedVEM, deviation only"):
        cells = []
        for which in ("personal", "smallest", "global"):
            cells.append(spread(numbers(of[name], which, 100)))
            cells.append("" if name == "pFedVEM" else spread(gains(of[name], full, which), "+.1f"))
        rows.append([name, *cells])
    which = [word for name in ("personal", "smallest tenth", "global") for word in (name, "change")]
    return markdown(["", *which], rows)


def smallest() -> str:
    """Return the accuracies of personal models on the smallest tenth of clients and on all."""
    rows = []
    for name, lines in hundred().items():
        if "only" in name or not numbers(lines, "smallest"):
            continue
        few, everyone = (numbers(lines, which, 100) for which in ("smallest", "personal"))
        apart = [a - b for a, b in zip(few, everyone, strict=True)]
        rows.append((mean(few), [name, *map(spread, (few, everyone)), spread(apart, "+.1f")]))
    head = ["method", "smallest tenth", "all clients", "difference"]
    return markdown(head, [row for _, row in sorted(rows, reverse=True)])


def pairs() -> str:
    """Return pFedMB's table I, each method with the learning rate chosen on validation rows."""
    of = best(read(HERE / "pfedmb/pairs.csv"), "tuning", over="rate")
    paper = {"Local": "87.26", "FedAvg": "87.99", "5 branches": "89.49"}
    paper["5 branches, unweighted"] = "89.08"
    names = ["FedAvg", "Local", *(f"{b} branches" for b in (1, 2, 5, 8)), "5 branches, unweighted"]
    rows = []
    for name in names:
        lines = of[name]
        before, after = (spread(numbers(lines, which, 100)) for which in ("before", "after"))
        gain = "" if name == "FedAvg" else spread(gains(lines, of["FedAvg"], "after"), "+.2f")
        about = [spread(numbers(lines, which), ".2f") for which in ("within", "between")]
        used = ", ".join(f"{float(line['used']):.0f}" for line in lines if line["used"])
        rows.append(
            [name, paper.get(name, ""), lines[0]["rate"], before, after, gain, *about, used]
        )
    head = ["method", "paper", "rate", "before", "after", "above FedAvg"]
    return markdown([*head, "within pairs", "between pairs", "branches used"], rows)


TABLE_TWO = {
    "Local": ("67.54", "61.27", "90.01", "83.79"),
    "FedAvg": ("73.52", "70.32", "89.69", "85.68"),
    "FedProx": ("73.38", "70.98", "90.51", "86.07"),
    "FedPer": ("71.97", "67.57", "89.73", "84.56"),
    "pFedMe": ("72.92", "71.00", "90.04", "83.09"),
    "IFCA": ("72.42", "69.84", "90.17", "85.68"),
    "FedFomo": ("67.55", "62.62", "90.12", "85.01"),
    "FedAMP": ("72.91", "65.98", "90.73", "85.90"),
    "pFedMB": ("73.53", "72.14", "90.69", "86.73"),
}
COLUMNS = ("Dirichlet, 15", "Dirichlet, 50", "two classes, 15", "two classes, 50")
"""pFedMB's table II for CIFAR-10, by partition and number of clients."""


def others(partition: str) -> str:
    """Return pFedMB's table II where all methods have run: the paper, ours, the gain."""
    head, cells = ["method"], {name: [name] for name in TABLE_TWO}
    columns = by(read(HERE / "pfedmb/others.csv"), "column")
    for at, column in enumerate(COLUMNS):
        of = finished(columns.get(column, []), "method")
        if not column.startswith(partition) or of.keys() < TABLE_TWO.keys():
            continue
        best_of = best([line for some in of.values() for line in some], "tuning", over="rate")
        head += [f"{column}: paper", "ours", "above FedAvg"]
        for name, theirs in TABLE_TWO.items():
            lines = best_of[name]
            gain = spread(gains(lines, best_of["FedAvg"], "after"), "+.1f")
            ours = spread(numbers(lines, "after", 100))
            cells[name] += [theirs[at], ours, "" if name == "FedAvg" else gain]
    return markdown(head, cells.values())


def curves(steps: str) -> dict[str, dict[int, list[float]]]:
    """Return new clients' accuracies: method -> epochs (or passes if `steps` is all) -> values."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in read(HERE / "fedabml/new_clients.csv"):
        at = int(line["epochs"]) * (int(line["steps"]) if steps == "all" else 1)
        value = 100 * float(line["accuracy"])
        found.setdefault(line["method"], {}).setdefault(at, []).append(value)
    return {n: of for n, of in found.items() if all(len(v) >= SEEDS for v in of.values())}


def new_clients(steps: str, shown: tuple[int, ...]) -> str:
    """Return the accuracies of held-out clients."""
    rows = [[name, *(spread(of.get(at, [])) for at in shown)] for name, of in curves(steps).items()]
    return markdown(["", *map(str, shown)], rows)


def entropies() -> str:
    """Return the entropies of FedABML's clients for known and out-of-distribution rows."""
    rows = []
    for name, lines in finished(read(HERE / "fedabml/entropy.csv"), "method").items():
        means = [
            spread(numbers(lines, which), ".2f")
            for which in ("in_distribution", "out_of_distribution")
        ]
        share = [spread(numbers(lines, which, 100)) for which in ("accuracy", "auroc")]
        rows.append([name, share[0], *means, share[1]])
    if not rows:
        return f"Not yet run with {SEEDS} seeds."
    head = ["method", "accuracy", "entropy: in distribution", "out of distribution", "AUROC"]
    return markdown(head, rows)


def outcomes(paper: str) -> str:
    """Return what became of the claims of a paper: its differences, ours, a word, a command."""
    rows = []
    for name, study in studies_of(paper).items():
        lines = harness.results(paper, name, study)
        command = f"`reproduce.py {paper} {name}`"
        for place, claim in enumerate(study.claims):
            found = harness.judge(paper, name, study, claim, lines)
            title = study.title if place == 0 else ""
            rows.append([title, claim.text, found.paper, found.here, found.word, command])
    head = ["table or figure", "claim", "difference: paper", "size small", "outcome", "command"]
    return markdown(head, rows)


def studies_of(paper: str) -> dict[str, harness.Study]:
    """Return the studies of a paper by name."""
    found: dict[str, harness.Study] = import_module(f"{paper}.studies").STUDIES
    return found


def counts() -> str:
    """Return how many claims of each paper have which outcome."""
    words = ("reproduced", "direction holds", "not reproduced", "not run", "not tried")
    rows = []
    for paper, title in harness.PAPERS.items():
        told = [
            harness.judge(paper, name, study, claim, harness.results(paper, name, study)).word
            for name, study in studies_of(paper).items()
            for claim in study.claims
        ]
        of = [next(w for w in words if text.startswith(w)) for text in told]
        link = f"[{title}]({paper}/README.md)"
        rows.append([link, str(len(of)), *(str(of.count(word)) for word in words)])
    return markdown(["paper", "claims", *words], rows)


LENGTHS = {  # settings of local training -> their names on a page
    "epochs": "epochs {}",
    "base_epochs": "epochs of bases {}",
    "head_epochs": "epochs of heads {}",
    "steps": "inner steps {}",
    "batch": "minibatches of {}",
    "num_particles": "draws {}",
}


def lengths(study: harness.Study) -> str:
    """Return the epochs, steps, minibatches and draws of a study's rows at size small."""
    case, parts = next(iter(study.cases)), []
    for setting, text in LENGTHS.items():
        rows: dict[str, list[str]] = {}
        for row, entry in study.entries.items():
            value = study.value("small", case, row, setting)
            if value is not None and setting not in entry.varied and has(entry.method, setting):
                rows.setdefault(value, []).append(row)
        values = sorted(rows, key=lambda value: -len(rows[value]))
        if values:
            others = "; ".join(f"{', '.join(rows[value])}: {value}" for value in values[1:])
            parts.append(text.format(values[0]) + (f" ({others})" if others else ""))
    return f"Local training: {', '.join(parts)}."


def has(method: str, setting: str) -> bool:
    """Return whether a setting matters: draws do where weights are random."""
    own = setting in signature(builds()[method]).parameters and method != "fedavg"
    return own or setting != "num_particles"


SCALE = {  # settings of a run -> their names on a page
    "data": "data",
    "net": "network",
    "pixels": "pixels",
    "per_class": "training rows of a class",
    "clients": "clients",
    "held_out": "held-out clients",
    "participation": "participation",
    "rounds": "rounds",
    "server_data": "rows of the server",
    "words": "training",
}


def scale(study: harness.Study) -> str:
    """Return what differs between size small and size paper, the latter in parentheses."""
    first, parts = next(iter(study.entries)), []
    for setting, name in SCALE.items():
        pairs = {
            tuple(written(study, size, case, first, setting) for size in ("small", "paper")): None
            for case, column in study.cases.items()
            if not column.untried
        }
        if differ := [f"{small} ({paper})" for small, paper in pairs if small != paper]:
            parts.append(f"{name} {', '.join(differ)}")
    return f"Size small, with size paper in parentheses: {'; '.join(parts)}."


def written(study: harness.Study, size: str, case: str, row: str, setting: str) -> str:
    """Return a setting of a run as text."""
    value = getattr(study.settings(size, case, row), setting)
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value) if value is not None else "original" if setting == "pixels" else "all"


def without_result(study: harness.Study, run: Collection[tuple[str, str]]) -> str:
    """Return which rows and columns of a study have no result, and why."""
    reasons: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for case, column in study.cases.items():
        rows = [r for r in study.entries if not study.skipped(case, r)]
        left = tuple(row for row in rows if (case, row) not in run)
        if left:
            names = () if case and len(left) == len(rows) else left
            of = reasons.setdefault(column.untried or "not run", {})
            of.setdefault(names, []).append(case)
    texts = []
    for reason, of in reasons.items():
        cells = "; ".join(
            f"{', '.join(names)} in {'; '.join(cases)}"
            if any(names) and any(cases)
            else "; ".join(names or cases)
            for names, cases in of.items()
        )
        texts.append(f"{cells} ({reason})")
    return f"No result: {'; '.join(texts)}." if texts else ""


def choice(study: harness.Study) -> str:
    """Return how the settings of a study's rows were chosen, and which are at an edge."""
    if study.grid:
        return (
            f"Settings: for each seed, the best of {len(study.grid)} ({', '.join(study.grid)}) on "
            "validation rows of the other seeds."
        )
    if not study.tuning:
        return "Settings: equal for the clients of all rows, not tuned."
    methods = {entry.method for entry in study.entries.values()}
    at_edge = "; ".join(
        f"`{method}` " + ", ".join(f"{name} {note}" for name, note in of.items())
        for method, of in sorted(edges(study.tuning).items())
        if method in methods
    )
    return (
        f"Settings: chosen in `tuned/{study.tuning}` on validation rows of another partition, "
        f"{partition_of(study.tuning)}; of these, at the edge of the grid: {at_edge or 'none'}."
    )


def cells(paper: str) -> str:
    """Return the tables of all studies that have results at size small."""
    parts = []
    for name, study in studies_of(paper).items():
        lines = harness.results(paper, name, study)
        seeds = Counter((line["case"], line["row"]) for line in lines)
        run = [cell for cell, number in seeds.items() if number >= harness.REPORTED]
        cases = [case for case in study.cases if any(at == case for at, _ in run)]
        metrics = study.metrics[: study.shown]
        if not run:
            continue
        columns = [(case, metric) for case in cases for metric in metrics]
        head = [study.title]
        for case, metric in columns:
            what = f"{case + ', ' if case and len(cases) > 1 else ''}{metric.replace('_', ' ')}"
            head += [f"{what} (paper)", what]
        rows = []
        for row in study.entries:
            shown = [row]
            for case, metric in columns:
                ours = harness.of_cell(lines, case, row, metric, study.scale)
                shown += [harness.values_of_paper(paper, name, case, row, metric)]
                shown += [spread(list(ours.values())) if len(ours) >= harness.REPORTED else ""]
            rows.append(shown)
        of = [n for n, word in enumerate(head) if n == 0 or any(row[n] for row in rows)]
        kept = markdown(
            [head[n] for n in of], [[row[n] for n in of] for row in rows if any(row[1:])]
        )
        notes = (study.about, scale(study), lengths(study), choice(study))
        about = "\n".join(filter(None, (*notes, without_result(study, run))))
        parts.append(f"{about}\n\n{kept}")
    return "\n\n".join(parts) or "No study has been run at size small."


def costs(paper: str) -> str:
    """Return the expected hours of columns of tables at size paper, and their longest rows."""
    rows = []
    for name, study in studies_of(paper).items():
        for case, lines in by(read(HERE / paper / "cost" / f"{name}.csv"), "case").items():
            longest = max(lines, key=lambda line: float(line["hours"]))
            settings = study.settings("paper", case, longest["row"])
            hours = f"{sum(numbers(lines, 'hours')):,.0f}"
            row = f"{longest['row']} {float(longest['hours']):,.1f}"
            shares = numbers(lines, "part", 100)
            timed = "whole" if min(shares) > 99 else f"at least {min(shares):.0f}%"
            about = [settings.net, f"{settings.rounds:,}", longest["settings"].split("seeds=")[1]]
            rows.append([study.title, case, str(len(lines)), *about, hours, row, timed])
    if not rows:
        return "No row has been timed."
    machines = {line["machine"] for path in HERE.glob(f"{paper}/cost/*.csv") for line in read(path)}
    head = ["table or figure", "column", "rows", "network", "rounds", "seeds", "hours, all rows"]
    table = markdown([*head, "longest row, hours", "timed part of a round"], rows)
    return f"One core of {'; '.join(sorted(machines))}.\n\n{table}"


TABLES: dict[str, Callable[[], str]] = {
    **{f"outcomes_{p}": partial(outcomes, p) for p in harness.PAPERS},
    **{f"cells_{p}": partial(cells, p) for p in harness.PAPERS},
    **{f"costs_{p}": partial(costs, p) for p in harness.PAPERS},
    "counts": counts,
    "students": lambda: students("students.csv"),
    "one_round": lambda: students("one_round.csv"),
    "cifar10": lambda: students("cifar10.csv"),
    "convnet": convnet,
    "swiss_roll": swiss_roll,
    "overfit": lambda: regimes("overfit.csv"),
    "underfit": lambda: regimes("underfit.csv"),
    "pull": pull,
    "federations": federations,
    "settings": settings,
    "at_chosen": at_chosen,
    "ablations": ablations,
    "rounding": rounding,
    "statistics": statistics,
    "smallest": smallest,
    "pairs": pairs,
    "others": lambda: others("Dirichlet"),
    "two_classes": lambda: others("two classes"),
    "by_epochs": lambda: new_clients("own", (0, 1, 2, 5, 10)),
    "by_steps": lambda: new_clients("all", (1, 2, 5, 10, 25)),
    "entropies": entropies,
    "commands": commands,
    "claims": claims,
}


def updated(page: str) -> str:
    """Return a page with its tables generated again."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def main() -> int:
    """Write the pages, or with --check print those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit with 1 if a page is out of date."
    )
    args = parser.parse_args()
    old = {path: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("**/README.md"))}
    new = {path: updated(text) for path, text in old.items()}
    differ = [path for path in old if new[path] != old[path]]
    for path in differ:
        print(path.relative_to(HERE))
        if not args.check:
            path.write_text(new[path], encoding="utf-8")
    return int(args.check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
