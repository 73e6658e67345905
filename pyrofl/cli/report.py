"""What a run leaves behind: its folder of tables, posterior and figures, and lines to read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrofl import figures
from pyrofl.cli.setup import Task
from pyrofl.cli.tables import main_metric
from pyrofl.files.run_folder import CLIENTS, METRICS, versions, write_csv, write_json
from pyrofl.inference.evaluation.asked import Adapted
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.fit import Run
from pyrofl.inference.loop.messages import kinds
from pyrofl.inference.posteriors import export
from pyrofl.partitions.federations import class_counts
from pyrofl.tensors import Tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = ("partition", "curves", "clients", "reliability", "confidence")
LAST = "run.json"  # where it is all else is too
TABLES = ("metrics.csv", "clients.csv", "posterior.nc")
RESULTS = (LAST, *TABLES, *(f"figures/{name}.png" for name in FIGURES))


def save(
    folder: Path,
    run: Run,
    scores: list[Scores],
    task: Task,
    arguments: Mapping[str, Any],
    draws: int,
) -> None:
    """Write a run's folder, `LAST` last.

    Args:
        folder: exists; files of a former run with the same names are replaced or removed.
        run: the fitted method.
        scores: of the last round.
        task: what it was fitted to.
        arguments: of the command.
        draws: from every client's posterior; 0 writes none.
    """
    pictures = folder / "figures"
    pictures.mkdir(exist_ok=True)
    for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    statistics = run.statistics()
    write_csv(folder / "metrics.csv", METRICS, ([row[c] for c in METRICS] for row in run.history))
    write_csv(folder / "clients.csv", CLIENTS, run.client_rows(scores, statistics))
    if draws:
        view, adapted = main_view(run)
        dims = {name: task.net.dims(name) for name in task.net.shapes}
        export.save(run.to_arviz(draws, dims, model=view, adapted=adapted), folder / "posterior.nc")
    for name, figure in draw(run, scores, statistics, arguments):
        figures.save(figure, pictures / f"{name}.png")
    write_json(folder / LAST, facts(run, scores, task, arguments))


def facts(
    run: Run, scores: list[Scores], task: Task, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what run.json holds: how the run came about, what it cost and how it was tested."""
    return {
        "arguments": dict(arguments),
        "versions": versions(),
        "seed": task.seed,
        "seeds": {"split": task.split, **vars(task.seeds)},
        "rounds": run.state.number,
        "clients": run.data.clients,
        "message_scalars": sum(math.prod(v.shape[1:]) for v in run.state.message.values()),
        "seconds": [r.seconds for r in run.records],
        "bytes_down": [r.down for r in run.records],
        "bytes_up": [r.up for r in run.records],
        "trained": [len(r.trained) for r in run.records],
        "steps": [sum(r.steps) for r in run.records],
        "reported": [len(r.reported) for r in run.records],
        "silent": [[run.data.names[i] for i in r.silent] for r in run.records],
        "rejected": [r.rejected for r in run.records],
        "rejected_by_kind": kinds(reason for r in run.records for reason in r.rejected),
        "tested": {
            "rows": scores[0].part,
            "policy": arguments.get("test"),
            "draws": run.draws,
            "weighting": "client",
        },
    }


def main_view(run: Run) -> tuple[str, Adapted]:
    """Return the model that a method is about and how it is adapted.

    The personal one where there is one, after what the method runs before its test.
    """
    view = run.method.main_view
    return view, "adapt" if view == "personal" and run.method.adapt else "none"


def draw(
    run: Run, scores: list[Scores], statistics: Tensors, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Figure]]:
    """Yield the figures that a run has something to show in, by name."""
    data, sizes = run.data, run.data.sizes
    if data.classes:
        yield "partition", figures.partition(class_counts(data), data.names, data.classes)
    metric = main_metric(scores)
    named = {name: arguments[name] for name in ("method", "seed")}
    rows = [{**row, **named} for row in run.history]
    yield "curves", figures.curves(rows, metric)
    shown = next(s for s in scores if (s.model, s.adapted) == main_view(run))
    yield "clients", figures.clients(sizes[shown.ids], shown.values[metric], metric)
    if metric == "accuracy":
        main, how = main_view(run)
        adapted: dict[str, Adapted] = {main: how}
        bins = {
            f"{model} model{', adapted' if adapted.get(model) == 'adapt' else ''}": run.calibration(
                model=model, adapted=adapted.get(model, "none"), part=scores[0].part
            )
            for model in run.method.views
        }
        yield "reliability", figures.reliability(bins)
    if {"tau", "deviation"} <= statistics.keys():
        tau, deviation = (statistics[name].cpu() for name in ("tau", "deviation"))
        yield "confidence", figures.confidence(tau, deviation, sizes[: data.clients])
