"""Results of a run: its folder of tables, posterior and figures, and printed summaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyrofl import figures
from pyrofl.data import Federation
from pyrofl.data.tables.wording import listed
from pyrofl.experiments import rows
from pyrofl.experiments.console import FAILED, Stopped, ending, tell, trace, what
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.jobs import Job
from pyrofl.files import run_folder, run_json, text_tables
from pyrofl.files.link_safe_files import subfolder
from pyrofl.inference.conformal.sets import PredictionSets
from pyrofl.inference.definition.budget import PrivacySpent
from pyrofl.inference.definition.seeds import separate
from pyrofl.inference.engine.messages import count_by_rule
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.inference.evaluation.specification import Adaptation, default_evaluation
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.metrics import Bins
from pyrofl.nets import Network
from pyrofl.partitions.federations import class_counts
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = ("partition", "curves", "convergence", "watched", "clients", "reliability", "confidence")
LAST = run_json.RUN_FILE  # where it is all tables are too
TABLES = ("metrics.csv", "clients.csv", rows.ROWS_FILE, "posterior.nc")
PAGE = "report.html"  # by the command report
RESULTS = (LAST, *TABLES, PAGE, *(f"figures/{name}.png" for name in FIGURES))


def about(data: Federation, likelihood: str, experiment: Experiment) -> str:
    """Describe the data in one line for the user: rows, target, features and omitted columns."""
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
    """Return the description of the data for run.json: rows, likelihood, classes and columns."""
    kind: dict[str, Any] = {"rows": len(data.y), "likelihood": likelihood, "classes": data.classes}
    return kind | (data.source.to_json() if data.source else {})


def save(job: Job, run: Run, scores: list[Scores], settings: Mapping[str, Any]) -> list[str]:
    """Write a run's tables, posterior and figures into its folder, replacing older results.

    Scores are of its end, and settings those of its checkpoint. A run that diverged has no
    posterior. Returns which figures could not be drawn, and why.
    """
    folder, draws = job.path, job.experiment.posterior_draws
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    statistics = run.statistics()
    write_tables(folder, run, scores, statistics)
    rows.save(job.experiment, folder, run.data, scores)
    if draws and run.status.kind != "diverged":
        view, adaptation = posterior_view(run)
        dims = network_axes(run, job.task.net, view)
        which: dict[str, Any] = {"model": view, "adaptation": adaptation, "coords": job.coords}
        which |= {"groups": job.groups, "progress": not job.experiment.quiet}
        export.save(run.to_arviz(draws, dims, **which), folder / "posterior.nc")
    run_json.write(folder, facts(job, run, scores), TABLES, settings)
    return drawn(folder, draw(job, run, scores, statistics))


def write_tables(folder: Path, run: Run, scores: list[Scores], statistics: Tensors) -> None:
    """Write a run's tables metrics.csv and clients.csv, and create the folder for its figures."""
    subfolder(folder / "figures")
    metrics = ([row[c] for c in run_folder.METRICS] for row in run.history)
    run_folder.write_csv(folder / "metrics.csv", run_folder.METRICS, metrics)
    clients = run.client_rows(scores, statistics)
    run_folder.write_csv(folder / "clients.csv", run_folder.CLIENTS, clients)


def drawn(folder: Path, shown: Iterable[tuple[str, Callable[[], Figure]]]) -> list[str]:
    """Plot and save figures; return an error message for each figure that failed."""
    failed = []
    subfolder(folder / "figures")
    for name, make in shown:
        path = folder / f"figures/{name}.png"
        try:
            figures.save(make(), path)
        except Exception as error:
            tell(trace(error))
            failed.append(f"{path}: {what(error)}")
    return failed


def figures_lack(folder: Path, failed: Sequence[str]) -> None:
    """Raise an error if any figure failed, stating that all other results are complete."""
    if failed:
        raise Stopped(f"{folder} holds all results, but no {'; no '.join(failed)}", FAILED)


def facts(job: Job, run: Run, scores: list[Scores]) -> dict[str, Any]:
    """Return the content of run.json for a job: settings, versions, costs and scores."""
    own: dict[str, Any] = {"methods": (job.name,), "seed": job.task.seed, "seeds": 1}
    experiment = replace(job.experiment, out=str(job.path), **own)
    return facts_of(experiment, run, scores, job.task.split, job.task.likelihood)


def facts_of(
    experiment: Experiment, run: Run, scores: Sequence[Scores], split: int, likelihood: str
) -> dict[str, Any]:
    """Return the content of run.json: settings, versions, costs and scores of a run.

    There may be no scores. The `split` is the seed of the partition.
    """
    records = run.records
    return {
        "schema": run_folder.SCHEMA,
        "experiment": experiment.to_json(),
        "versions": run_folder.versions(),
        "seed": experiment.seed,
        "seeds": {"split": split, **vars(separate(run.seed))},
        "data": columns(run.data, likelihood),
        "rounds": run.state.number,
        "privacy": run.privacy and run.privacy._asdict(),
        "status": {"text": str(run.status), **asdict(run.status)},
        "warnings": run.warnings,
        "clients": run.data.clients,
        "message_scalars": sum(math.prod(v.shape[1:]) for v in run.state.message.values()),
        "seconds": [r.seconds for r in records],
        "bytes_down": [r.bytes_down for r in records],
        "bytes_up": [r.bytes_up for r in records],
        "trained": [len(r.trained) for r in records],
        "steps": [sum(r.steps) for r in records],
        "reported": [len(r.reported) for r in records],
        "silent": [[run.data.names[i] for i in r.silent] for r in records],
        "rejected": [r.rejected for r in records],
        "moved": [r.moved for r in records],
        "watched": [r.watched for r in records],
        "rejected_by_kind": count_by_rule(reason for r in records for reason in r.rejected),
        "tested": {
            "rows": scores[0].part if scores else "none",
            "policy": experiment.test,
            "draws": run.draws,
            "weighting": "client",
            "main": default_evaluation(run.method),
        },
    }


def posterior_view(run: Run) -> tuple[str, Adaptation]:
    """Return which model's posterior is saved, such as "personal", and its default adaptation."""
    view, main = run.method.posterior_view, default_evaluation(run.method)
    return main if view == main[0] else (view, "none")


def network_axes(run: Run, net: Network, view: str) -> dict[str, tuple[str, ...]]:
    """Return names of the axes of those parameters of a network that are sites of a posterior."""
    few = torch.zeros(1, dtype=torch.long)
    sites = posterior(run.method, run.data, run.state, 1, model=view, ids=few)
    return {name: net.dims(name) for name in net.shapes if name in sites}


def draw(
    job: Job, run: Run, scores: list[Scores], statistics: Tensors
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield the name of each figure that applies to a run, and a function that plots it."""
    data = run.data
    if data.classes:
        yield "partition", lambda: figures.partition(class_counts(data), data.names, data.classes)
    yield from figures_of_rounds(run, scores, job.name, job.task.seed)
    if run.records and run.records[-1].watched:
        yield "watched", lambda: figures.watched(run)
    if main_metric(scores) == "accuracy":
        yield "reliability", lambda: figures.reliability(_bins(run, scores))
    if {"tau", "deviation"} <= statistics.keys():
        tau, deviation = (statistics[name].cpu() for name in ("tau", "deviation"))
        yield "confidence", lambda: figures.confidence(tau, deviation, data.sizes[: data.clients])


def figures_of_rounds(
    run: Run, scores: list[Scores], name: str, seed: int
) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Yield name and plot function of each figure that needs no data of clients.

    These are learning curves, scores by client, and convergence.
    """
    if scores:
        metric, main = main_metric(scores), default_evaluation(run.method)
        shown = next((s for s in scores if (s.model, s.adaptation) == main), scores[0])
        history = run.metrics.assign(method=name, seed=seed)
        sizes, values = run.data.sizes[shown.ids], shown.values[metric]
        yield "curves", lambda: figures.curves(history, metric)
        yield "clients", lambda: figures.clients(sizes, values, metric)
    if not run.parameter_changes().empty:
        yield "convergence", lambda: figures.convergence(run)


def _bins(run: Run, scores: list[Scores]) -> dict[str, Bins]:
    """Return the calibration bins of every model of a run: title -> bins."""
    main, bins = default_evaluation(run.method), {}
    for model in run.method.views:
        adaptation = main[1] if model == main[0] else "none"
        title = f"{model} model{', adapted' if adaptation == 'fine_tune' else ''}"
        bins[title] = run.calibration(model=model, adaptation=adaptation, part=scores[0].part)
    return bins


def main_metric(scores: list[Scores]) -> str:
    """Return the metric shown in figures: accuracy for classes, else RMSE."""
    return next(iter(scores[0].values))


def score_table(scores: list[Scores], spent: PrivacySpent | None = None) -> str:
    """Format a run's scores, one line per model and population, and its privacy cost."""
    metrics, costs = list(scores[0].values), cost(spent)
    more, costs_text = list(costs), [f"{value:.4g}" for value in costs.values()]
    lines = (
        (s.model, s.adaptation, s.population, *map(s.mean, metrics), *costs_text) for s in scores
    )
    return text_tables.table(("model", "adaptation", "population", *metrics, *more), lines)


def cost(spent: PrivacySpent | None) -> dict[str, float]:
    """Return the privacy cost, epsilon and delta, by column name; empty without privacy."""
    return {spent.label: spent.epsilon, "delta": spent.delta} if spent else {}


def failure_reason(run: Run) -> str:
    """Return the reason why a run diverged or aggregated no update; "" for other runs."""
    status = run.status
    if status.kind == "diverged":
        return f"{status}; no posterior.nc; expected another, such as with smaller learning rates"
    return "" if status.merged else str(status)


def save_predictions(
    path: Path,
    owners: Sequence[str | None],
    predictions: Mapping[str | None, Predictions | PredictionSets],
) -> None:
    """Write the predictions of all rows to a CSV file, in the order of the input table."""
    each = {owner: zip(*one.columns().values(), strict=True) for owner, one in predictions.items()}
    names = list(next(iter(predictions.values())).columns())
    rows = ([n, owner or "", *next(each[owner])] for n, owner in enumerate(owners, 1))
    run_folder.prepare(path.parent, overwrite=True)
    with ending(lambda what: f"{path} cannot be written: {what}"):
        run_folder.write_csv(path, ("row", "client", *names), rows)
