"""Comparison of methods: means over seeds, differences from the best, tuned settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from pyrofl.arguments import Count, Whole, checked
from pyrofl.data import Federation
from pyrofl.experiments.results import cost
from pyrofl.experiments.saved_runs import NOT_CONVERGED
from pyrofl.files import run_folder, text_tables
from pyrofl.inference.definition.budget import SEEDED
from pyrofl.inference.definition.method import Method
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import Chains, FitOptions, MethodOrBuilder
from pyrofl.inference.fitted_run.run import Run
from pyrofl.paired import interval_over_seeds

if TYPE_CHECKING:
    from pandas import DataFrame, Series

CompareRow = tuple[str, int, str, str, str, float, str]
"""method, seed, model, adaptation, metric, value, tuned: one line of compare.csv."""

SMALLEST_FRACTION = 0.1  # share of the clients that counts as small
MARKED = "* the best mean of its column; ±: standard error over seeds; "
MARKED += "minus *: difference from the line with *, 95% interval"
FEW_SEEDS_NOTES = {
    1: ["One seed: differences have no interval; use --seeds 3 or more."],
    2: ["Two seeds: intervals of differences are wide; use --seeds 3 or more."],
}
SHOWN = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "smallest_accuracy": "smallest 10%",
    "smallest_rmse": "smallest 10%",
    "held_out_accuracy": "new clients",
    "held_out_rmse": "new clients",
    "pooled_accuracy": "all test rows",
    "pooled_rmse": "all test rows",
    "nll": "NLL",
    "crps": "CRPS",
    "ece": "ECE",
    "epsilon": "epsilon",
    f"epsilon ({SEEDED})": f"epsilon ({SEEDED})",
}


@dataclass(frozen=True, repr=False)
class Comparison:
    """Fits of several methods with several seeds; printed as the table of `pyrofl compare`.

    Attributes:
        runs: name of a method -> its runs, one for each seed.
        scores: name -> the scores of each run, of all its models.
        seeds: of the runs of each method.
    """

    runs: Mapping[str, Chains]
    scores: Mapping[str, Sequence[Sequence[Scores]]]
    seeds: Sequence[int]

    def to_dataframe(self) -> DataFrame:
        """Return a data frame with the columns of compare.csv: a row per run, model and metric."""
        from pandas import DataFrame

        return DataFrame(self._rows(), columns=list(run_folder.COMPARE))

    def _rows(self) -> Iterator[CompareRow]:
        for name, seed, run in self._named():
            yield from compare_rows(name, seed, run, self.scores[name][self.seeds.index(seed)])

    def _named(self) -> Iterator[tuple[str, int, Run]]:
        for name, runs in self.runs.items():
            for seed, run in zip(self.seeds, runs, strict=True):
                yield name, seed, run

    def __repr__(self) -> str:
        """Return the table of mean scores and of differences from the best."""
        open_runs = {(n, seed) for n, seed, run in self._named() if run.status.kind != "converged"}
        return compare_table(self._rows(), open_runs)


@checked
def compare(
    methods: Mapping[str, MethodOrBuilder] | Sequence[Method],
    data: Federation,
    rounds: Whole | None = None,
    *,
    seeds: Count | Sequence[int] = 3,
    **options: Unpack[FitOptions],
) -> Comparison:
    """Fit several methods with the same seeds, and compare their scores on test rows.

    Args:
        methods: name -> method, or a sequence of methods with different names. A function of the
            number of rounds may stand for a method, as in `fit`.
        data: the federation.
        rounds: number of rounds of each; None: until each has converged.
        seeds: number of seeds, or the seeds.
        options: further arguments of `fit`, the same for all methods.

    Returns:
        The comparison. Its text has the mean and the standard error over seeds of each model, and
        the difference from the best with its 95% interval.

    Raises:
        ValueError: if there is no method, two have the same name, or an argument does not fit.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import fedavg, local
        >>> data = federations.split(datasets.load("digits"), "slices:2", clients=10)
        >>> net = nets.build("softmax", (64,), 10)
        >>> found = pyrofl.compare(
        ...     [local.build(net), fedavg.build(net)], data, rounds=2, seeds=2, progress=False
        ... )
        >>> sorted(found.runs)
        ['fedavg', 'local']
        >>> found.to_dataframe()["seed"].nunique()
        2
    """
    if isinstance(methods, Mapping):
        named = dict(methods)
    else:
        twice = [n for n, count in Counter(one.name for one in methods).items() if count > 1]
        if twice:
            raise ValueError(
                f"several methods are named {', '.join(twice)}; pass a dict of names and methods"
            )
        named = {one.name: one for one in methods}
    if not named:
        raise ValueError("methods is empty; expected at least one")
    each = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    runs, scores = {}, {}
    for name, method in named.items():
        chains = fit(method, data, rounds, seeds=each, **options)
        assert isinstance(chains, Chains)  # as seeds are given
        runs[name] = chains
        scores[name] = [run.evaluate_all() for run in chains]
    return Comparison(runs, scores, each)


def compare_rows(
    name: str, seed: int, run: Run, scores: Sequence[Scores], tuned: str = ""
) -> Iterator[CompareRow]:
    """Yield one run's rows of compare.csv: the value of every metric of every model.

    A metric's name alone is about clients that train; "held_out_..." is about new ones,
    "pooled_..." about all test rows, "smallest_..." about the tenth with the fewest rows.
    """
    spent = run.privacy
    for s in scores:
        parts = {f"{s.population}_": s}
        if s.population == "training":
            parts = {"": s, "smallest_": s.smallest(SMALLEST_FRACTION, run.data.sizes)}
        for prefix, part in parts.items():
            for metric in s.values:
                label, value = f"{prefix}{metric}", part.mean(metric)
                yield name, seed, s.model, s.adaptation, label, value, tuned
        for label, value in cost(spent).items() if s.population == "training" else ():
            yield name, seed, s.model, s.adaptation, label, value, tuned


def compare_table(rows: Iterable[CompareRow], open_runs: Set[tuple[str, int]] = frozenset()) -> str:
    """Format a table of mean scores ± standard errors over seeds, one line per method and model."""
    head, lines, notes = compare_lines(rows, open_runs)
    return "\n".join([text_tables.table(head, lines), *notes])


def compare_lines(
    rows: Iterable[CompareRow], open_runs: Set[tuple[str, int]] = frozenset()
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return a table that compares methods, as its header, its lines and the notes below it.

    The best mean of a column has a star. The last column is the difference of each line from the
    best of the main metric, on the same seeds, its 95% interval, and which of both has not
    converged: `open_runs` have not, each (method, seed). What was tuned stands at the end.
    """
    from pandas import DataFrame

    table = DataFrame(rows, columns=list(run_folder.COMPARE))
    of = ["method", "model", "adaptation"]
    head = [metric for metric in SHOWN if metric in set(table["metric"])]
    order = list(dict.fromkeys(zip(*(table[column] for column in of), strict=True)))
    scored = [metric for metric in head if not metric.startswith("epsilon")]
    values = table.pivot_table("value", of, ["metric", "seed"], dropna=False)
    means = DataFrame({m: values[m].mean(axis=1) for m in head})
    pick = {m: "idxmax" if m.endswith("accuracy") else "idxmin" for m in scored}
    best = {m: getattr(means[m].loc[order], pick[m])() for m in scored if len(order) > 1}
    lines: list[tuple[str, ...]] = []
    for key in order:
        cells = [
            spread(observed_scores) if len(observed_scores := values[m].loc[key].dropna()) else "-"
            for m in head
        ]
        stars = [" *" if best.get(m) == key else "" for m in head]
        lines.append((*key, *map("".join, zip(cells, stars, strict=True))))
    names = (*of, *(SHOWN[metric] for metric in head))
    more: dict[str, list[str]] = {}
    if best:
        main, first = values[head[0]], best[head[0]]
        opens = {key: _open(main.loc[key], key[0], open_runs) for key in order}
        minus = [
            difference(main.loc[k], main.loc[first], head[0], (opens[k], opens[first]))
            if k != first
            else opens[k]
            for k in order
        ]
        more[f"{SHOWN[head[0]]} minus *"] = minus
    if bool((table["tuned"] != "").any()):
        tuned = table.groupby(of, sort=False)["tuned"].first()
        more["tuned"] = [str(tuned.loc[key]) for key in order]
    added = zip(*more.values(), strict=True) if more else [()] * len(order)
    laid = [(*line, *cells) for line, cells in zip(lines, added, strict=True)]
    notes = [MARKED, *FEW_SEEDS_NOTES.get(table["seed"].nunique(), ())] if best else []
    return (*names, *more), laid, notes


def _open(values: Series, method: str, open_runs: Set[tuple[str, int]]) -> str:
    """Return a note on how many runs of a method have not converged; "" if all have."""
    seeds = [int(seed) for seed in values.dropna().index]
    count = sum((method, seed) in open_runs for seed in seeds)
    return (
        ""
        if not count
        else NOT_CONVERGED
        if count == len(seeds)
        else f"{NOT_CONVERGED}: {count} of {len(seeds)}"
    )


def difference(score: Series, base: Series, metric: str, opens: tuple[str, str] = ("", "")) -> str:
    """Format the mean difference of two models' scores over seeds, with its 95% interval.

    The metric is accuracy, whose scores lie between 0 and 1, or an error, from 0. Words are added
    for the runs of both lines that have not converged, `opens`.
    >>> from pandas import Series
    >>> base = Series([0.9, 0.92, 0.91])
    >>> difference(Series([0.88, 0.89, 0.885]), base, "accuracy", ("", "not converged"))
    '-0.025 (-0.037 to -0.013); *: not converged'
    >>> difference(Series([0.88]), Series([0.9]), "accuracy")
    '-0.020'
    """
    is_scored = (score.notna() & base.notna()).to_numpy()
    most = 1.0 if metric.endswith("accuracy") else math.inf
    interval = interval_over_seeds(
        score.to_numpy()[is_scored], base.to_numpy()[is_scored], 0.0, most
    )
    ends = f" ({interval.low:+.3f} to {interval.high:+.3f})" if interval.low == interval.low else ""
    words = (f"; {lead}{text}" for lead, text in zip(("", "*: "), opens, strict=True) if text)
    return f"{interval.mean:+.3f}{ends}{''.join(words)}"


def spread(values: Series) -> str:
    """Format the mean of some values and, for two values or more, its standard error.

    >>> from pandas import Series
    >>> spread(Series([0.9, 0.92])), spread(Series([0.9]))
    ('0.9100 ± 0.0100', '0.9000')
    >>> spread(Series([1.5e-7]))
    '1.500e-07'
    """
    error = f" ± {text_tables.format_number(values.sem())}" if len(values) > 1 else ""
    return f"{text_tables.format_number(values.mean())}{error}"
