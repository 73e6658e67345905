"""What a run leaves behind: its folder of tables, posterior and figures, and lines to read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyrofl import figures
from pyrofl.cli import rows
from pyrofl.cli.ends import FAILED, Stopped, tell, trace, what
from pyrofl.cli.experiment import Experiment
from pyrofl.cli.folders import OPEN
from pyrofl.cli.methods import Job
from pyrofl.data import Federation
from pyrofl.data.wording import listed
from pyrofl.files import run_folder
from pyrofl.inference.budget import SEEDED, Spent
from pyrofl.inference.engine.messages import kinds
from pyrofl.inference.evaluation.asked import Adapted, usual
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.posteriors import export
from pyrofl.inference.run import Run
from pyrofl.inference.seeds import separate
from pyrofl.metrics import Bins
from pyrofl.paired import interval_over_seeds
from pyrofl.partitions.federations import class_counts
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import Series

FIGURES = (
    "partition", "curves", "convergence", "watched", "clients", "reliability", "confidence"
)  # fmt: skip
LAST = "run.json"  # where it is all tables are too
TABLES = ("metrics.csv", "clients.csv", rows.NAME, "posterior.nc")
PAGE = "report.html"  # by the command report
RESULTS = (LAST, *TABLES, PAGE, *(f"figures/{name}.png" for name in FIGURES))

CompareRow = tuple[str, int, str, str, str, float, str]
"""method, seed, model, adapted, metric, value, tuned: one line of compare.csv."""

SMALLEST = 0.1  # share of the clients that counts as small
MARKED = "* the best mean of its column; differences from it: on the same seeds, 95% intervals"
FEW = {
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


def about(data: Federation, likelihood: str, experiment: Experiment) -> str:
    """Tell in one line what is predicted from what, and what of a file was left out."""
    if data.classes:
        kind = f"{len(data.classes)} classes ({listed(data.classes)})"
    else:
        kind = f"numbers from {data.y.min():g} to {data.y.max():g}, likelihood {likelihood}"
        if data.source and experiment.likelihood is None and torch.equal(data.y, data.y.round()):
            is_count = bool((data.y >= 0).all() and (data.y > 1).any())
            counts = "for counts, --likelihood poisson; " if is_count else ""
            kind += f" (all are whole: {counts}for classes, --likelihood categorical)"
    x = {"x": str(list(data.x.shape[1:]))}
    told = data.source.summary() if data.source else {"target": "y"} | x
    parts = [f"{len(data.y)} rows", f"target {told.pop('target')}: {kind}"]
    parts += [f"{name}: {text}" for name, text in told.items()]
    return " ".join(f"{experiment.data}: {'; '.join(parts)}".split())


def columns(data: Federation, likelihood: str) -> dict[str, Any]:
    """Return what run.json says of the data."""
    kind: dict[str, Any] = {"rows": len(data.y), "likelihood": likelihood, "classes": data.classes}
    return kind | (data.source.to_json() if data.source else {})


def save(job: Job, run: Run, scores: list[Scores]) -> list[str]:
    """Write a run's folder, tables, `LAST`, figures; what a former run left there goes.

    Scores are of its end. A run that diverged has no posterior. Returns which figures could not be
    drawn, and why.
    """
    folder, draws = job.path, job.experiment.posterior_draws
    (folder / "figures").mkdir(exist_ok=True)
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    statistics = run.statistics()
    metrics = ([row[c] for c in run_folder.METRICS] for row in run.history)
    run_folder.write_csv(folder / "metrics.csv", run_folder.METRICS, metrics)
    run_folder.write_csv(
        folder / "clients.csv", run_folder.CLIENTS, run.client_rows(scores, statistics)
    )
    rows.save(job.experiment, folder, run.data, scores)
    if draws and run.verdict.kind != "diverged":
        view, adapted = posterior_view(run)
        dims = {name: job.task.net.dims(name) for name in job.task.net.shapes}
        which: dict[str, Any] = {
            "model": view,
            "adapted": adapted,
            "progress": not job.experiment.quiet,
        }
        found = run.to_arviz(draws, dims, coords=job.coords, groups=job.groups, **which)
        export.save(found, folder / "posterior.nc")
    run_folder.write_json(folder / LAST, facts(job, run, scores))
    return drawn(folder, draw(job, run, scores, statistics))


def drawn(folder: Path, shown: Iterable[tuple[str, Callable[[], Figure]]]) -> list[str]:
    """Draw and write figures; say which failed, and why, as no table is to be lost by that."""
    failed = []
    for name, make in shown:
        path = folder / f"figures/{name}.png"
        try:
            figures.save(make(), path)
        except Exception as error:
            tell(trace(error))
            failed.append(f"{path}: {what(error)}")
    return failed


def figures_lack(folder: Path, failed: Sequence[str]) -> None:
    """End a command that has all its results but some figures."""
    if failed:
        raise Stopped(f"{folder} holds all results, but no {'; no '.join(failed)}", FAILED)


def facts(job: Job, run: Run, scores: list[Scores]) -> dict[str, Any]:
    """Return what run.json holds of a job."""
    one = replace(job.experiment, methods=(job.name,), seed=job.task.seed, seeds=1)
    experiment = replace(one, out=str(job.path))
    return facts_of(experiment, run, scores, job.task.split, job.task.likelihood)


def facts_of(
    experiment: Experiment, run: Run, scores: Sequence[Scores], split: int, likelihood: str
) -> dict[str, Any]:
    """Return what run.json holds: how the run came about, what it cost and how it was tested.

    Args:
        experiment: of this run alone.
        run: after its last round.
        scores: of its end; there may be none.
        split: seed of the partition.
        likelihood: of the response.
    """
    records = run.records
    return {
        "experiment": experiment.to_json(),
        "versions": run_folder.versions(),
        "seed": experiment.seed,
        "seeds": {"split": split, **vars(separate(run.seed))},
        "data": columns(run.data, likelihood),
        "rounds": run.state.number,
        "privacy": run.privacy and run.privacy._asdict(),
        "verdict": {"text": str(run.verdict), **asdict(run.verdict)},
        "notes": run.notes,
        "clients": run.data.clients,
        "message_scalars": sum(math.prod(v.shape[1:]) for v in run.state.message.values()),
        "seconds": [r.seconds for r in records],
        "bytes_down": [r.down for r in records],
        "bytes_up": [r.up for r in records],
        "trained": [len(r.trained) for r in records],
        "steps": [sum(r.steps) for r in records],
        "reported": [len(r.reported) for r in records],
        "silent": [[run.data.names[i] for i in r.silent] for r in records],
        "rejected": [r.rejected for r in records],
        "moved": [r.moved for r in records],
        "watched": [r.watched for r in records],
        "rejected_by_kind": kinds(reason for r in records for reason in r.rejected),
        "tested": {
            "rows": scores[0].part if scores else "none",
            "policy": experiment.test,
            "draws": run.draws,
            "weighting": "client",
            "main": usual(run.method),
        },
    }


def posterior_view(run: Run) -> tuple[str, Adapted]:
    """Return the model that draws are of, adapted as `usual` says."""
    view, main = run.method.posterior_view, usual(run.method)
    return main if view == main[0] else (view, "none")


def draw(
    job: Job, run: Run, scores: list[Scores], statistics: Tensors
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the figures that a run has something to show in, by name."""
    data, sizes, metric, main = run.data, run.data.sizes, main_metric(scores), usual(run.method)
    shown = next(s for s in scores if (s.model, s.adapted) == main)
    if data.classes:
        yield "partition", lambda: figures.partition(class_counts(data), data.names, data.classes)
    history = run.metrics.assign(method=job.name, seed=job.task.seed)
    yield "curves", lambda: figures.curves(history, metric)
    if not run.convergence().empty:
        yield "convergence", lambda: figures.convergence(run)
    if run.records and run.records[-1].watched:
        yield "watched", lambda: figures.watched(run)
    yield "clients", lambda: figures.clients(sizes[shown.ids], shown.values[metric], metric)
    if metric == "accuracy":
        yield "reliability", lambda: figures.reliability(_bins(run, scores))
    if {"tau", "deviation"} <= statistics.keys():
        tau, deviation = (statistics[name].cpu() for name in ("tau", "deviation"))
        yield "confidence", lambda: figures.confidence(tau, deviation, sizes[: data.clients])


def _bins(run: Run, scores: list[Scores]) -> dict[str, Bins]:
    """Gather the predictions of every model by confidence."""
    main, bins = usual(run.method), {}
    for model in run.method.views:
        adapted = main[1] if model == main[0] else "none"
        title = f"{model} model{', adapted' if adapted == 'adapt' else ''}"
        bins[title] = run.calibration(model=model, adapted=adapted, part=scores[0].part)
    return bins


def main_metric(scores: list[Scores]) -> str:
    """Return the metric that figures show: accuracy of classes, else RMSE."""
    return next(iter(scores[0].values))


def score_table(scores: list[Scores], spent: Spent | None = None) -> str:
    """Lay out the scores of one run: a line for each model and population, and what was spent."""
    metrics, cost = list(scores[0].values), _cost(spent)
    more, told = list(cost), [f"{value:.4g}" for value in cost.values()]
    lines = ((s.model, s.adapted, s.population, *map(s.mean, metrics), *told) for s in scores)
    return run_folder.table(("model", "adapted", "population", *metrics, *more), lines)


def compare_rows(job: Job, run: Run, scores: list[Scores]) -> Iterator[CompareRow]:
    """Yield the rows of compare.csv for one run.

    A metric's name alone is about clients that train; "held_out_..." is about new ones,
    "pooled_..." about all test rows, "smallest_..." about the tenth with the fewest rows.
    """
    spent = run.privacy
    for s in scores:
        parts = {f"{s.population}_": s}
        if s.population == "training":
            parts = {"": s, "smallest_": s.smallest(SMALLEST, run.data.sizes)}
        for prefix, part in parts.items():
            for metric in s.values:
                name, value = f"{prefix}{metric}", part.mean(metric)
                yield job.name, job.task.seed, s.model, s.adapted, name, value, job.tuned
        for name, value in _cost(spent).items() if s.population == "training" else ():
            yield job.name, job.task.seed, s.model, s.adapted, name, value, job.tuned


def _cost(spent: Spent | None) -> dict[str, float]:
    """Return epsilon and delta by their names in tables; nothing for a run without privacy."""
    return {spent.label: spent.epsilon, "delta": spent.delta} if spent else {}


def compare_table(rows: Iterable[CompareRow], open_runs: Set[tuple[str, int]] = frozenset()) -> str:
    """Lay out mean ± standard error over seeds, a line for each method and model.

    Args:
        rows: of compare.csv.
        open_runs: (method, seed) of the runs that have not converged.
    """
    head, lines, notes = compare_lines(rows, open_runs)
    return "\n".join([run_folder.table(head, lines), *notes])


def compare_lines(
    rows: Iterable[CompareRow], open_runs: Set[tuple[str, int]] = frozenset()
) -> tuple[tuple[str, ...], list[tuple[str, ...]], list[str]]:
    """Return the head and the lines of that table, and the notes below it.

    The best mean of a column has a star. The last column is the difference of each line from the
    best of the main metric, on the same seeds, its 95% interval, and which of both has not
    converged. What was tuned stands at the end.
    """
    from pandas import DataFrame

    found = DataFrame(rows, columns=list(run_folder.COMPARE))
    of = ["method", "model", "adapted"]
    head = [metric for metric in SHOWN if metric in set(found["metric"])]
    order = list(dict.fromkeys(zip(*(found[column] for column in of), strict=True)))
    scored = [metric for metric in head if not metric.startswith("epsilon")]
    values = found.pivot_table("value", of, ["metric", "seed"], dropna=False)
    means = DataFrame({m: values[m].mean(axis=1) for m in head})
    best = {m: _best(means[m].loc[order], m) for m in scored if len(order) > 1}
    lines: list[tuple[str, ...]] = []
    for key in order:
        cells = [spread(known) if len(known := values[m].loc[key].dropna()) else "-" for m in head]
        stars = [" *" if best.get(m) == key else "" for m in head]
        lines.append((*key, *map("".join, zip(cells, stars, strict=True))))
    names = (*of, *(SHOWN[metric] for metric in head))
    more: dict[str, list[str]] = {}
    if best:
        main, first = values[head[0]], best[head[0]]
        opens = {key: _open(main.loc[key], key[0], open_runs) for key in order}
        more[f"{SHOWN[head[0]]} minus *"] = [
            difference(main.loc[key], main.loc[first], head[0], (opens[key], opens[first]))
            if key != first
            else opens[key]
            for key in order
        ]
    if bool((found["tuned"] != "").any()):
        tuned = found.groupby(of, sort=False)["tuned"].first()
        more["tuned"] = [str(tuned.loc[key]) for key in order]
    added = zip(*more.values(), strict=True) if more else [()] * len(order)
    laid = [(*line, *cells) for line, cells in zip(lines, added, strict=True)]
    notes = [MARKED, *FEW.get(found["seed"].nunique(), ())] if best else []
    return (*names, *more), laid, notes


def _open(values: Series, method: str, open_runs: Set[tuple[str, int]]) -> str:
    """Return the words for a line whose runs, of known seeds, have not all converged."""
    seeds = [int(seed) for seed in values.dropna().index]
    count = sum((method, seed) in open_runs for seed in seeds)
    return "" if not count else OPEN if count == len(seeds) else f"{OPEN}: {count} of {len(seeds)}"


def _best(means: Series, metric: str) -> tuple[str, ...]:
    """Return the line whose mean is best; of accuracies the largest, of errors the smallest."""
    key: tuple[str, ...] = means.idxmax() if metric.endswith("accuracy") else means.idxmin()
    return key


def difference(score: Series, base: Series, metric: str, opens: tuple[str, str] = ("", "")) -> str:
    """Write a mean difference of paired seeds and, of two or more, its 95% interval.

    Args:
        score: of one line, by seed.
        base: of the line that it is compared with.
        metric: accuracy, whose scores lie between 0 and 1, or an error, from 0.
        opens: words for the runs of both that have not converged, or "".

    >>> from pandas import Series
    >>> base = Series([0.9, 0.92, 0.91])
    >>> difference(Series([0.88, 0.89, 0.885]), base, "accuracy", ("", "not converged"))
    '-0.025 (-0.037 to -0.013); *: not converged'
    >>> difference(Series([0.88]), Series([0.9]), "accuracy")
    '-0.020'
    """
    known = (score.notna() & base.notna()).to_numpy()
    most = 1.0 if metric.endswith("accuracy") else math.inf
    found = interval_over_seeds(score.to_numpy()[known], base.to_numpy()[known], 0.0, most)
    ends = f" ({found.low:+.3f} to {found.high:+.3f})" if found.low == found.low else ""
    words = (f"; {lead}{text}" for lead, text in zip(("", "*: "), opens, strict=True) if text)
    return f"{found.mean:+.3f}{ends}{''.join(words)}"


def spread(values: Series) -> str:
    """Write a mean and, of two values or more, its standard error.

    >>> from pandas import Series
    >>> spread(Series([0.9, 0.92])), spread(Series([0.9]))
    ('0.9100 ± 0.0100', '0.9000')
    >>> spread(Series([1.5e-7]))
    '1.500e-07'
    """
    error = f" ± {run_folder.decimals(values.sem())}" if len(values) > 1 else ""
    return f"{run_folder.decimals(values.mean())}{error}"
