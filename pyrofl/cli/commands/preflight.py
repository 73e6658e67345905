"""Checks before training that the results can be written after the last round."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from pyrofl import figures
from pyrofl.choices import GROUPS, NETWORKS
from pyrofl.experiments.experiment import MAX_UNREQUESTED
from pyrofl.experiments.jobs import Job
from pyrofl.experiments.results import network_axes, posterior_view
from pyrofl.experiments.tasks import Task
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.fitted_run import loggers
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors import export
from pyrofl.inference.posteriors.arviz import CHEAP
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.validation.validate import validate_method


def preflight(jobs: Sequence[Job]) -> list[Job]:
    """Validate all fits of a command before training: imports, figures, methods, posterior output.

    Returns the jobs, which differ in method and seed, with the groups that they are to write.
    """
    export.now()  # refuses a SOURCE_DATE_EPOCH that is none
    figures.try_out()
    if jobs[0].experiment.posterior_draws:
        export.import_arviz()
        import_module("h5netcdf")
    if jobs[0].experiment.log:
        loggers.library(jobs[0].experiment.log)
    settled: dict[str, Any] = {}
    for job in {job.name: job for job in jobs}.values():
        _find_room(job)
        settled[job.name] = _groups(job) if job.experiment.posterior_draws else ("all", set())
        _check(job)
    return [_labeled(job, *settled[job.name]) for job in jobs]


def _check(job: Job) -> None:
    """Raise the errors that `fit` would raise for an invalid method, before any training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which the fit gives again
        try:
            validate_method(
                method_schedule(job.method)(0), job.task.data, chunk_size=job.experiment.chunk_size
            )
        except ValueError as error:
            raise ValueError(f"{job.name}: {error}") from error


def _labeled(job: Job, groups: str | Sequence[str], axes: set[str]) -> Job:
    """Add the ArviZ groups to save, and labels of the given axes, to the record of a fit."""
    labels = labels_of(str(job.experiment.net), job.task).items()
    return replace(job, groups=groups, coords={n: words for n, words in labels if n in axes})


def _groups(job: Job) -> tuple[str | Sequence[str], set[str]]:
    """Return the ArviZ groups and axis names of a fit's posterior, found by one trial draw."""
    experiment, task = job.experiment, job.task
    method = method_schedule(job.method)(0)
    run = Run(method, task.data, first(method, task.data, task.seeds), task.seeds)
    few, view = torch.zeros(1, dtype=torch.long), posterior_view(run)[0]
    try:
        how: dict[str, Any] = {"groups": experiment.arviz_groups or "all", "ids": few}
        dims = network_axes(run, task.net, view)
        one = run.to_arviz(1, dims, model=view, corrected=False, **how)
    except ValueError as error:
        raise ValueError(f"--arviz-groups with {job.name}: {error}") from error
    clients, rows = task.data.clients, task.data.sizes[: task.data.clients]
    more, axes = 0.0, set[str]()
    for group in GROUPS:
        for value in one[group].data_vars.values() if group in one else ():
            axes |= set(map(str, value.dims))
            if group not in CHEAP and "chain" in value.dims:
                times = float(rows.sum() / rows[0]) if "row" in value.dims else clients
                more += value.size * times
    chosen = "all" if more * experiment.posterior_draws <= MAX_UNREQUESTED else CHEAP
    return experiment.arviz_groups or chosen, axes


def labels_of(spec: str, task: Task) -> dict[str, tuple[str, ...]]:
    """Return labels of the input and output axes of a built-in network: axis -> labels."""
    data, net, labels = task.data, task.net, {}
    first, *_, last = (*net.shapes, *net.shapes)
    classes, features = data.classes, data.source.features if data.source else ()
    if spec.partition(":")[0] not in NETWORKS or spec == "mean":
        return {}
    if classes and net.shapes[last][0] == len(classes):
        labels[net.dims(last)[0]] = classes
    if data.x.dim() == 2 and net.shapes[first][-1] == len(features):
        labels[net.dims(first)[-1]] = features
    return labels


def _find_room(job: Job) -> None:
    """Raise an error if the requested posterior draws do not fit in memory."""
    experiment, task = job.experiment, job.task
    requested = [("--draws", experiment.draws or 0, 1)]
    requested += [("--posterior-draws", experiment.posterior_draws, task.data.clients)]
    if max(draws for _, draws, _ in requested) < 1000:
        return  # as many as people ask for
    method = method_schedule(job.method)(0)
    state = first(method, task.data, task.seeds)
    ids = torch.zeros(1, dtype=torch.long)
    one = posterior(method, task.data, state, 1, ids=ids, model=method.main_view)
    size = sum(value.numel() for value in one.values())
    for flag, draws, clients in requested:
        try:
            torch.empty(draws * clients * size)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{flag} is {draws}, with {job.name} {draws * clients * size:,} numbers, for which "
                "there is no memory; expected fewer"
            ) from error
