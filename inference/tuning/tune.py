"""Hyperparameter search by Optuna, scored on validation rows of the clients.

All settings are trained with one seed, each as a trial of an Optuna study, in their order. The best
of them, the finalists, are trained with further seeds, each with other validation rows. The
finalist with the best mean over the seeds is chosen; of equal ones, the first in the order of the
settings. Its margin over the runner-up is the mean of their differences, seed by seed, with its
standard error.

No test row is used: the federation of the trials does not contain them. A setting that diverges,
fails or aggregates no message, with any seed, is ranked last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, Unpack

from pyrofl.arguments import Count, ProperShare, check_name, checked
from pyrofl.choices import Metric
from pyrofl.data import Federation
from pyrofl.inference.definition.description import described
from pyrofl.inference.definition.seeds import Seed, later, separate
from pyrofl.inference.engine.federate import LoopOptions
from pyrofl.inference.engine.start import method_schedule
from pyrofl.inference.fitted_run.chains import MethodOrBuilder
from pyrofl.inference.fitted_run.saving import settings_of_run
from pyrofl.inference.tuning import studies
from pyrofl.inference.tuning.results import (
    Setting,
    TrialScore,
    TuningResult,
    describe_setting,
    ranked_settings,
)
from pyrofl.partitions.validation import held_back
from pyrofl.user_warnings import warn_user

ATTEMPTS_PER_SETTING = 100  # random settings drawn for each requested one, before they are too few


class AllFailed(ValueError):
    """Error raised if every setting of a hyperparameter search fails."""


@checked
def tune(
    build: Callable[..., MethodOrBuilder],
    data: Federation,
    param_grid: Mapping[str, Any] | Sequence[Setting],
    rounds: Count,
    *,
    trials: Count | None = None,
    metric: Metric | None = None,
    validation_fraction: ProperShare = 0.2,
    seed: Seed = 0,
    draws: Count | None = None,
    folder: str | Path | None = None,
    seeds: Count = 3,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
    **loop: Unpack[LoopOptions],
) -> TuningResult:
    """Choose a method's hyperparameters on validation rows of the clients, with Optuna.

    Args:
        build: keyword arguments -> a method, or round number -> method.
        data: the federation; its test rows are not used.
        param_grid: name -> values to try, all combinations; or a list of settings, each
            name -> value. A name may have a range of Optuna instead of values, such as
            `optuna.distributions.FloatDistribution(0.001, 0.1, log=True)`.
        rounds: rounds of the finalists. With more than three settings, those that are worse than
            the median of the completed ones are stopped after one or two thirds of the rounds.
        trials: number of settings that are drawn at random if a name has a range.
        metric: "accuracy", "nll" or "rmse" (the latter two are minimized), averaged over clients.
            None is accuracy for classes, nll for numbers. Evaluated is the main model, with the
            method's adaptation if it is personal.
        validation_fraction: fraction of every client's training rows used for validation.
        seed: seed of the validation rows and of the runs, which have the same random numbers. The
            further seeds of the finalists are the next numbers.
        draws: posterior draws for predictions; None uses the mean of the guide.
        folder: folder for Optuna's storage, tune.journal. The search continues after the completed
            trials that it holds; another search is refused. None stores nothing.
        seeds: number of seeds for the finalists.
        about: further settings, as JSON, that must be equal if a search is continued.
        progress: show every run's rounds.
        loop: further arguments of `federate`, such as participation or chunk_size.

    Returns:
        All trials, the chosen setting and its margin.

    Raises:
        ValueError: if Optuna is not installed, there is no setting, two are equal, build raises an
            error for one, no client has two training rows, the method does not have the metric,
            the folder holds another search, or all settings fail.

    Warns:
        UserWarning: if a chosen number is the smallest or the largest of at least three.
    """
    for name in loop:
        check_name(name, (*signature(tune).parameters, *LoopOptions.__annotations__), "argument")
    settings = combinations(param_grid, trials, seed)
    methods = [build(**setting) for setting in settings]
    refuse_metric(metric, data)
    by: Metric = metric or ("accuracy" if data.classes else "nll")
    search: dict[str, Any] = {"settings": [describe_setting(setting) for setting in settings]}
    search |= {"rounds": rounds, "metric": by, "validation fraction": validation_fraction}
    if folder:
        search |= {"draws": draws, "hash of the methods": _hash(methods)}
        search |= settings_of_run(data, seed, about)
    stages = studies.stages(rounds) if len(settings) > studies.FINALISTS else [rounds]
    how: Any = {"draws": draws, "progress": progress, **loop}

    with studies.open_storage(folder, by, search) as study_of:

        def trained(k: int, which: Sequence[int]) -> list[TrialScore]:
            """Train the settings `which` with the k-th seed, unless the storage has them."""
            run_seed = later(seed, k)
            held = held_back(data, validation_fraction, seed=separate(run_seed).noise)
            study, stops = study_of(k), [rounds] if k else stages
            for i in which[len(studies.finished_trials(study)) :]:
                trial = studies.ask(study, settings, i)
                studies.train(trial, methods[i], held, stops, by, seed=run_seed, **how)
            done = zip(which, studies.finished_trials(study), strict=True)
            return [row for i, one in done for row in studies.rows_of(one, i, k, stops)]

        rows = run_trials(len(settings), by, trained, seeds)
    result = TuningResult(settings, tuple(rows), by, ranked_settings(rows, by)[0])
    for text in result.edge_warnings:
        warn_user(text)
    return result


def _hash(methods: Sequence[MethodOrBuilder]) -> str:
    parts = [described(method_schedule(method)(0)) for method in methods]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def refuse_metric(metric: Metric | None, data: Federation) -> None:
    """Raise ValueError if a metric does not fit the type of response: classes or numbers."""
    is_binary = not data.y.dim() > 1 and bool(((data.y == 0) | (data.y == 1)).all())
    if metric == "rmse" and data.classes:
        raise ValueError("metric is 'rmse', but y has classes; use accuracy or nll")
    if metric == "accuracy" and not data.classes and not is_binary:
        raise ValueError("metric is 'accuracy', but y has numbers; use rmse or nll")


def combinations(
    param_grid: Mapping[str, Any] | Sequence[Setting], trials: int | None = None, seed: Seed = 0
) -> tuple[Setting, ...]:
    """Return all settings of a parameter grid; of one with ranges, `trials` random settings.

    Raises:
        ValueError: if there is no setting, two are equal, or `trials` does not fit the grid.

    >>> settings = combinations({"lr": (0.1, 0.3), "momentum": (0, 0.9)})
    >>> [describe_setting(setting) for setting in settings]
    ['lr=0.1 momentum=0', 'lr=0.1 momentum=0.9', 'lr=0.3 momentum=0', 'lr=0.3 momentum=0.9']
    """
    grid = param_grid if isinstance(param_grid, Mapping) else {}
    kind = studies.load_optuna().distributions.BaseDistribution
    ranges = [name for name, values in grid.items() if isinstance(values, kind)]
    for name, values in grid.items():
        if name not in ranges and (isinstance(values, str) or not isinstance(values, Sequence)):
            raise ValueError(f"param_grid[{name!r}] is {values!r}; expected a list of values")
    if ranges and trials is None:
        raise ValueError(f"param_grid[{ranges[0]!r}] is a range; expected trials, their number")
    if trials is not None and not ranges:
        raise ValueError(f"trials is {trials}, and param_grid has no range; expected None")
    if ranges:
        settings = _drawn(grid, ranges, trials or 0, separate(seed).noise)
    elif isinstance(param_grid, Mapping):
        settings = [dict(zip(grid, some, strict=True)) for some in product(*grid.values())]
    else:
        settings = [_named(setting) for setting in param_grid]
    words = [describe_setting(setting) for setting in settings]
    if not settings or len(set(words)) < len(words):
        again = next((f"{w!r} twice" for w in words if words.count(w) > 1), "no setting")
        raise ValueError(f"param_grid has {again}; pass at least one setting, without duplicates")
    return tuple(settings)


def _named(setting: Any) -> dict[str, Any]:
    if not isinstance(setting, Mapping):
        raise ValueError(f"param_grid has {setting!r}; expected dicts of name -> value")
    return dict(setting)


def _drawn(
    grid: Mapping[str, Any], ranges: Sequence[str], trials: int, seed: int
) -> list[dict[str, Any]]:
    """Draw different settings uniformly from ranges, on their scale, and from lists of values."""
    if not all(name in ranges or len(values) for name, values in grid.items()):
        return []
    settings: dict[str, dict[str, Any]] = {}
    for params in studies.draw_params(grid, ranges, ATTEMPTS_PER_SETTING * trials, seed):
        setting = {n: v if n in ranges else grid[n][v] for n, v in params.items()}
        settings.setdefault(describe_setting(setting), setting)
        if len(settings) == trials:
            return list(settings.values())
    raise ValueError(
        f"trials is {trials}, and param_grid has {len(settings)} settings; expected at most so many"
    )


def run_trials(
    count: int,
    by: Metric,
    trained: Callable[[int, Sequence[int]], list[TrialScore]],
    seeds: int = 3,
) -> list[TrialScore]:
    """Train `count` settings with the first seed and the finalists with all; return all trials.

    A single finalist is trained with one seed. `trained(k, which)` returns the trials of the
    settings `which` with the k-th seed.
    """
    trials = trained(0, range(count))
    finalists = ranked_settings(trials, by)[: studies.FINALISTS]
    for k in range(1, seeds if len(finalists) > 1 else 1):
        failed = {one.setting for one in trials if one.problem}
        trials += trained(k, [i for i in finalists if i not in failed])
    if not ranked_settings(trials, by):
        raise AllFailed(
            f"all {count} settings fail, the first: {trials[0].problem}; try others, such as "
            "smaller learning rates"
        )
    return trials
