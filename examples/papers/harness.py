"""Studies of papers: a table or figure as settings, methods, the paper's values and claims.

A study is declared once at the paper's scale; `small` and `smoke` are changes of it, so that all
three sizes run the same code. Its results are rows of a CSV file, which say how they were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
from files import Lines, in_words, read, spread  # noqa: F401
from settings import accepted_settings, digest, tuned, usual

import pyrofl
from pyrofl import Federation, datasets, federations, nets
from pyrofl.data import Dataset
from pyrofl.experiments.methods import methods
from pyrofl.experiments.tasks import Task, participation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seeds
from pyrofl.inference.engine.participation import Stragglers
from pyrofl.tensors import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAPERS = {"pfedvem": "pFedVEM", "pfedmb": "pFedMB", "metavd": "MetaVD", "fedbe": "FedBE"}
PAPERS["fedabml"] = "FedABML"
SIZES = ("smoke", "small", "paper")
REPORTED = 3  # seeds that a result needs
FILES: dict[str, tuple[str, dict[str, str]]] = {  # name -> file NAME.npz, options of its loader
    "cifar100-coarse": ("cifar100", {"target": "coarse"}),
}
Changes = Mapping[str, Any]
Scores = Mapping[str, float | None]


@dataclass(frozen=True)
class Settings:
    """What a run costs and whom it trains: data, clients, network and rounds.

    Attributes:
        data: name of a data set, whose files are in the folder of `--data-dir`: NAME.npz there, or
            the distributed files.
        pixels: height and width to which images are resized; None keeps them.
        per_class: training rows of each class, over all clients; None: all.
        tested: test rows of each class; None: all.
        server_data: rows of the server as a number, a share or the name of another data set.
        server_rows: at most this number of rows of the server.
        participation: as `pyrofl compare --participation`.
        min_work: smallest fraction of its epochs that a client completes.
        words: settings of all methods that accept them, as `--set`.
        options: further numbers that a study's measure reads.
    """

    data: str = "digits"
    pixels: int | None = None
    per_class: int | None = None
    tested: int | None = None
    partition: str = "iid"
    clients: int | None = 10
    held_out: int = 0
    server_data: int | float | str | None = None
    server_rows: int | None = None
    test: str = "same_shares"
    net: str = "mlp:50"
    rounds: int = 10
    participation: str = "everyone"
    min_work: float = 1.0
    words: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str) -> Any:
        """Return one of the further numbers."""
        return dict(self.options)[name]


@dataclass(frozen=True)
class Entry:
    """A row of a table: a method and its settings.

    Attributes:
        method: name in pyrofl.
        words: settings that define the row, at every size.
        paper: settings at size paper, where the others come from the tuning.
        changes: of the settings of the run.
        varied: settings that the table itself varies, so that they are not the tuned ones.
    """

    method: str
    words: tuple[str, ...] = ()
    paper: tuple[str, ...] = ()
    changes: Changes = field(default_factory=dict)
    varied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A column of a table: changes of the settings, and further ones at size small.

    Attributes:
        untried: why there is no result at size small; "" if there is one.
    """

    changes: Changes = field(default_factory=dict)
    small: Changes = field(default_factory=dict)
    untried: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper: a score of one row and column is above that of another.

    Attributes:
        text: the statement.
        of, than: rows that are compared.
        case, than_case: their columns.
        metric, than_metric: their scores.
        sign: 1 above, -1 below, 0 equal within `within` points.
        paper: what the paper says where it has no numbers.
        scale: 100 for percent, 1 for other scores.
    """

    text: str
    of: str
    than: str
    case: str
    metric: str
    than_case: str = ""
    than_metric: str = ""
    sign: int = 1
    within: float = 1.0
    paper: str = ""
    scale: float = 100


@dataclass(frozen=True)
class Trial:
    """One run of a study: a method with its settings, data, seed and device."""

    settings: Settings
    method: str
    words: tuple[str, ...]
    seed: int
    data_dir: Path | None = None
    device: str = "cpu"

    @cached_property
    def task(self) -> Task:
        """Partition the data among clients and build the network."""
        s = self.settings
        dataset = load(s.data, s.pixels, s.per_class, s.tested, self.data_dir)
        if s.partition == "groups" and s.clients:
            dataset = first_groups(dataset, s.clients + s.held_out)
        server = server_rows(s, tuple(dataset.x.shape[1:]), self.data_dir)
        data = federations.split(
            dataset,
            s.partition,
            s.clients,
            seed=self.seed,
            test=s.test,
            held_out=s.held_out,
            server_data=server,
        )
        if s.server_rows and data.server_data is not None:
            data = replace(data, server_data=data.server_data[: s.server_rows])
        data = data.to(self.device)
        net = nets.build(s.net, tuple(data.x.shape[1:]), len(data.classes))
        seeds = Seeds(self.seed, self.seed, self.seed)
        return Task(self.seed, self.seed, seeds, data, net, dataset.likelihood)

    def built(self, *words: str) -> Method:
        """Return the method, with further settings."""
        (method,) = methods(
            (self.method,), (*self.words, *words), self.task, self.settings.rounds
        ).values()
        return method if isinstance(method, Method) else method(self.settings.rounds)

    def fit(self, data: Federation | None = None, **more: Any) -> pyrofl.Run:
        """Fit the method to the task's data, or to other rows of the same clients."""
        s, task = self.settings, self.task
        task = task if data is None else replace(task, data=data)
        (method,) = methods((self.method,), self.words, task, s.rounds).values()
        how = {
            "participation": participation(s.participation, task.data.clients),
            "stragglers": Stragglers(0.0, s.min_work),
            "seed": task.seeds,
            "progress": False,
        }
        rounds = more.pop("rounds", s.rounds)
        return pyrofl.fit(method, task.data, rounds, **how, **more)


@dataclass(frozen=True)
class Study:
    """A table or figure of a paper.

    Attributes:
        title: as the paper calls it, such as "table 1".
        about: what it shows, and what differs from the paper at every size.
        base: settings at size paper.
        small, smoke: changes at these sizes.
        cases: columns; entries: rows.
        metrics: scores of a run; those that the page's table shows come first.
        measure: function from a trial to its scores.
        claims: statements of the paper about it.
        grid: settings, one of which is chosen for each row and column by `choice`; () for none.
        choice: the score on validation rows that chooses, those of the other seeds.
        shown: how many metrics the page's table shows.
        tuning: file of the settings that were chosen on other partitions; None without it.
        skipped: pairs of column and row that the paper does not have.
        figure: function from the lines and the folder of data to a figure; None for none.
        scale: of the metrics in the page's table.
    """

    title: str
    about: str
    base: Settings
    metrics: tuple[str, ...]
    measure: Callable[[Trial], Scores]
    entries: Mapping[str, Entry]
    cases: Mapping[str, Case] = field(default_factory=lambda: {"": Case()})
    claims: tuple[Claim, ...] = ()
    small: Changes = field(default_factory=dict)
    smoke: Changes = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    choice: str = "validation"
    shown: int = 1
    tuning: str | None = None
    skipped: Callable[[str, str], bool] = lambda case, name: False
    figure: Callable[[Lines, Path | None], Figure] | None = None
    scale: float = 100

    def settings(self, size: str, case: str, name: str) -> Settings:
        """Return the settings of a run."""
        column, entry = self.cases[case], self.entries[name]
        found = replace(self.base, **column.changes)
        if size != "paper":
            found = replace(found, **{**self.small, **column.small})
        if size == "smoke":
            found = replace(found, **SMOKE | {"clients": found.clients and 10} | self.smoke)
        return replace(found, **entry.changes)

    def words(self, size: str, case: str, name: str, grid: str = "") -> tuple[str, ...]:
        """Return the settings of the method: shared ones, those chosen, those of its row."""
        entry, settings = self.entries[name], self.settings(size, case, name)
        known = accepted_settings(entry.method)
        words = {w.partition("=")[0]: w for w in settings.words if w.partition("=")[0] in known}
        if self.tuning:
            words |= tuned(self.tuning).get(entry.method, {})
        tried = [w for w in grid.split() if w.partition("=")[0] in known]
        several = (*tried, *entry.words, *(entry.paper if size == "paper" else ()))
        words |= {word.partition("=")[0]: word for word in several}
        return tuple(words.values())

    def value(self, size: str, case: str, name: str, setting: str) -> str | None:
        """Return a setting of a row as text, or its default; None if its method has none."""
        method = self.entries[name].method
        words = [w for w in self.words(size, case, name) if w.startswith(f"{setting}=")]
        if words:
            return words[-1].partition("=")[2]
        return str(usual(method, setting)) if setting in accepted_settings(method) else None

    def trial(
        self,
        size: str,
        case: str,
        name: str,
        grid: str = "",
        seed: int = 0,
        data_dir: Path | None = None,
        device: str = "cpu",
    ) -> Trial:
        """Return one run of the study."""
        words = self.words(size, case, name, grid)
        method = self.entries[name].method
        return Trial(self.settings(size, case, name), method, words, seed, data_dir, device)

    def runs(self, size: str) -> list[tuple[str, str, str]]:
        """Return the column, row and grid setting of every run of a size.

        Size smoke has all rows of the first column, and the first row of the others.
        """
        grid = self.grid[:1] if size == "smoke" else self.grid
        first = (next(iter(self.cases)), next(iter(self.entries)))
        return [
            (case, name, words)
            for case, column in self.cases.items()
            for name in self.entries
            for words in grid or ("",)
            if not self.skipped(case, name)
            and (size != "small" or not column.untried)
            and (size != "smoke" or case == first[0] or name == first[1])
        ]

    def recorded(self, size: str, case: str, name: str, grid: str) -> dict[str, Any]:
        """Return what identifies a result: the settings and the defaults of the method today."""
        trial = self.trial(size, case, name, grid)
        usual = Settings()
        changed = {
            one.name: getattr(trial.settings, one.name)
            for one in fields(Settings)
            if getattr(trial.settings, one.name) != getattr(usual, one.name) or one.name == "data"
        }
        text = {n: ",".join(map(str, v)) if n == "words" else v for n, v in changed.items()}
        text.pop("words", None)
        text |= {"options": ",".join(f"{n}:{v}" for n, v in trial.settings.options) or None}
        words = ",".join(trial.words)
        named = {n: v for n, v in text.items() if v is not None}
        return {"method": trial.method, **named, "set": words, "defaults": digest(trial.method)}


PARTS = (10, 20, 30, 40, 60, 80, 100)
"""Percent of the rounds after which curves have points."""


def in_parts(trial: Trial, data: Federation | None = None) -> Iterator[tuple[int, pyrofl.Run]]:
    """Yield the fitted run after each part of the rounds, with the percentage."""
    run, done = None, 0
    for percent in PARTS:
        rounds = max(1, round(percent * trial.settings.rounds / 100))
        if rounds > done:
            run = trial.fit(data, rounds=rounds, **({"resume_from": run} if run else {}))
            done = rounds
        yield percent, run


SMOKE: dict[str, Any] = {"rounds": 2, "per_class": 12, "tested": 4, "net": "mlp:8"}


def located(name: str, data_dir: Path | None) -> tuple[str, dict[str, str]]:
    """Return the name and options with which the library loads a data set.

    Raises:
        ValueError: if only a file has the data set, and it is not in the folder.
    """
    stem, options = FILES.get(name, (name, {}))
    path = data_dir / f"{stem}.npz" if data_dir else None
    if path and path.is_file():
        return f"npz:{path}", options
    if name in datasets.DATASETS:
        return name, {}
    raise ValueError(
        f"{stem}.npz is not in the folder of --data-dir ({data_dir}); expected this file, with the "
        "arrays images, labels, is_test, classes"
    )


@lru_cache(maxsize=2)
def whole(name: str, data_dir: Path | None, pixels: int | None = None) -> Dataset:
    """Load a data set by name, or several as domains of one with this height and width."""
    names = name.split("+")
    if len(names) > 1:
        parts = [whole.__wrapped__(one, data_dir) for one in names]
        colors = max(part.x.shape[1] for part in parts)
        return datasets.join(parts, (colors, pixels, pixels) if pixels else None)
    found, options = located(name, data_dir)
    return datasets.load(found, data_dir=data_dir, **options)


@lru_cache(maxsize=2)
def load(
    name: str, pixels: int | None, per_class: int | None, tested: int | None, data_dir: Path | None
) -> Dataset:
    """Load a data set, with at most these numbers of training and test rows of each class."""
    dataset = whole(name, data_dir, pixels if "+" in name else None)
    if tested is not None:
        dataset = replace(dataset, is_test=~dataset.is_test)
        dataset = datasets.per_class(dataset, tested)
        dataset = replace(dataset, is_test=~dataset.is_test)
    if per_class is not None:
        dataset = datasets.per_class(dataset, per_class)
    if pixels is not None:
        dataset = datasets.resized(dataset, (dataset.x.shape[1], pixels, pixels))
    return dataset


def first_groups(dataset: Dataset, number: int) -> Dataset:
    """Return the rows of the first groups of a data set, such as the first 200 writers."""
    ((column, codes),) = dataset.groups.items()
    rows = codes < number
    return replace(
        dataset,
        x=dataset.x[rows],
        y=dataset.y[rows],
        is_test=dataset.is_test[rows],
        groups={column: codes[rows]},
        group_names={column: dataset.group_names[column][:number]},
    )


def server_rows(
    s: Settings, shape: tuple[int, ...], data_dir: Path | None
) -> int | float | Dataset | None:
    """Return the unlabeled rows of the server: a number, a share, or another data set."""
    if not isinstance(s.server_data, str):
        return s.server_data
    other = load(s.server_data, None, s.server_rows, 1, data_dir)
    order = torch.randperm(len(other.y), generator=generator(0))
    other = replace(other, x=other.x[order], y=other.y[order], is_test=other.is_test[order])
    return other if tuple(other.x.shape[1:]) == shape else datasets.resized(other, shape)


# Verdicts.


def chosen_lines(study: Study, lines: Lines) -> Lines:
    """Return the lines of every cell at the chosen setting of the grid.

    For every seed it is the setting that is best, on average, on the validation rows of the other
    seeds; a single seed chooses for itself.
    """
    if not study.grid:
        return lines
    cells: dict[tuple[str, str], dict[str, dict[str, dict[str, str]]]] = {}
    for line in lines:
        cell = cells.setdefault((line["case"], line["row"]), {})
        cell.setdefault(line["grid"], {})[line["seed"]] = line
    return [
        cell[best_without(seed, study.choice, cell)][seed]
        for cell in cells.values()
        for seed in sorted(set.intersection(*map(set, cell.values())))
    ]


def best_without(seed: str, score: str, cell: Mapping[str, Mapping[str, dict[str, str]]]) -> str:
    """Return the setting of a grid with the best mean score of all seeds but one."""

    def of_others(setting: str) -> float:
        lines = cell[setting].items()
        values = [line[score] for other, line in lines if other != seed or len(lines) == 1]
        return mean(map(float, values)) if all(values) else -math.inf  # empty if a run diverged

    return max(cell, key=of_others)


def results(paper: str, name: str, study: Study) -> Lines:
    """Return the lines of a study at size small, at the chosen settings."""
    return chosen_lines(study, read(HERE / paper / "small" / f"{name}.csv"))


def of_cell(lines: Lines, case: str, row: str, metric: str, scale: float = 100) -> dict[str, float]:
    """Return a score for every seed."""
    return {
        line["seed"]: scale * float(line[metric])
        for line in lines
        if (line["case"], line["row"]) == (case, row) and line[metric]
    }


def values_of_paper(paper: str, study: str, case: str, row: str, metric: str) -> str:
    """Return a value of the paper, such as "61.0 ± 0.4", or ""."""
    for line in read(HERE / paper / "paper.csv"):
        if (line["study"], line["case"], line["row"], line["metric"]) == (study, case, row, metric):
            return line["value"]
    return ""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim: the paper's difference, ours, and a word."""

    paper: str
    here: str
    word: str


def judge(paper: str, name: str, study: Study, claim: Claim, lines: Lines) -> Verdict:
    """Compare the difference that a claim is about with that of the paper."""
    other_case = claim.than_case or claim.case
    other_metric = claim.than_metric or claim.metric
    texts = (
        values_of_paper(paper, name, claim.case, claim.of, claim.metric),
        values_of_paper(paper, name, other_case, claim.than, other_metric),
    )
    theirs = None
    if all(texts):
        first, second = (float(text.split()[0]) for text in texts)
        theirs = first - second
    said = f"{theirs:+.1f}" if theirs is not None else claim.paper
    untried = study.cases[claim.case].untried or study.cases[other_case].untried
    pair = (
        of_cell(lines, claim.case, claim.of, claim.metric, claim.scale),
        of_cell(lines, other_case, claim.than, other_metric, claim.scale),
    )
    gaps = [pair[0][seed] - pair[1][seed] for seed in pair[0].keys() & pair[1].keys()]
    if len(gaps) < REPORTED:
        return Verdict(said, "", f"not tried: {untried}" if untried else "not run")
    digits = "+.1f" if claim.scale == 100 else "+.2g"
    return Verdict(said, spread(gaps, digits), word_for(gaps, claim.sign, theirs, claim.within))


def word_for(gaps: Sequence[float], sign: int, theirs: float | None, within: float) -> str:
    """Return the verdict on paired differences, one of each seed.

    Reproduced: the 95% t interval is on the paper's side of zero, and the mean at least half the
    paper's difference. Direction holds: the mean is on that side by more than a standard error. For
    a claim of equality the interval, or the mean, is within the bound.
    """
    from scipy.stats import t

    center, error = mean(gaps), stdev(gaps) / len(gaps) ** 0.5
    half = float(t.ppf(0.975, len(gaps) - 1)) * error
    if sign == 0:
        if abs(center) + half <= within:
            return "reproduced"
        return "direction holds" if abs(center) <= within else "not reproduced"
    if sign * center > half and sign * center >= abs(theirs or 0) / 2:
        return "reproduced"
    if sign * center > error:
        return "direction holds"
    return "not reproduced" if sign * center < -error else "not reproduced: within the noise"
