"""Hyperparameter search by successive halving, scored on validation rows of the clients.

Successive halving leaves three finalists: all settings are trained for few rounds with one seed,
the best third of them for three times the number of rounds, and so on. Finalists are trained for
all rounds with several seeds, each with other validation rows. The one with the best mean over the
seeds is chosen; of equal ones, the first in the order of the settings. Its margin over the
runner-up is the mean of their differences, seed by seed, with its standard error.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016, with thirds as in Li et al., "Hyperband", JMLR 2018.

No test row is used: the federation of the trials does not contain them. A setting that diverges,
fails or aggregates no message, with any seed, is ranked last. A run continues from the last round
of its setting, so that no round is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from pyrofl.arguments import Count, ProperShare, checked
from pyrofl.choices import Metric
from pyrofl.data import Federation
from pyrofl.inference.definition.seeds import Seed, later, separate
from pyrofl.inference.engine.federate import LoopOptions
from pyrofl.inference.engine.messages import BadMessage
from pyrofl.inference.evaluation.specification import default_model
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import Fitting
from pyrofl.inference.fitted_run.checkpoints import Keeper, load
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import convergence_status
from pyrofl.inference.tuning.results import Setting, Trial, TuningResult, describe_setting, ranked
from pyrofl.partitions.validation import held_back

KEEP = 3  # one in KEEP settings continues, for KEEP times the rounds
FINALISTS = 3  # or fewer where there are fewer settings
FAILS = (ArithmeticError, BadMessage, RuntimeError, ValueError)  # of diverging runs


class AllFailed(ValueError):
    """Error raised if every setting of a hyperparameter search fails."""


@checked
def tune(
    build: Callable[..., Fitting],
    data: Federation,
    param_grid: Mapping[str, Sequence[Any]] | Sequence[Setting],
    rounds: Count,
    *,
    metric: Metric | None = None,
    validation_fraction: ProperShare = 0.2,
    seed: Seed = 0,
    draws: Count | None = None,
    folder: str | Path | None = None,
    every: Count | None = None,
    seeds: Count = 3,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
    **loop: Unpack[LoopOptions],
) -> TuningResult:
    """Choose a method's hyperparameters by successive halving, on validation rows of the clients.

    Args:
        build: keyword arguments -> a method, or round number -> method.
        data: the federation; its test rows are not used.
        param_grid: name -> values to try, all combinations; or a list of settings, each
            name -> value.
        rounds: rounds of the finalists. With 4 to 9 settings the first comparison is after a third
            of them; with three seeds, 9 settings cost as much as 11 runs, and 6 settings as 10.
        metric: "accuracy", "nll" or "rmse" (the latter two are minimized), averaged over clients.
            None is accuracy for classes, nll for numbers. Evaluated is the main model, with the
            method's adaptation if it is personal.
        validation_fraction: fraction of every client's training rows used for validation.
        seed: seed of the validation rows and of the runs, which have the same random numbers. The
            further seeds of the finalists are the next numbers.
        draws: posterior draws for predictions; None uses the mean of the guide.
        folder: folder for the runs, SETTING-SEED.safetensors. An existing run is continued if it
            has the same settings, otherwise an error is raised. None uses a temporary folder.
        every: rounds between checkpoints in the folder; None writes only complete runs.
        seeds: number of seeds for the finalists.
        about: further settings of the runs, see `save`.
        progress: show every run's rounds.
        loop: further arguments of `federate`, such as participation or chunk_size.

    Returns:
        All trials, the chosen setting and its margin.

    Raises:
        ValueError: if there is no setting, two are equal, build raises an error for one, no client
            has two training rows, the method does not have the metric, or all settings fail.
    """
    settings = combinations(param_grid)
    methods = [build(**setting) for setting in settings]
    refuse_metric(metric, data)
    by: Metric = metric or ("accuracy" if data.classes else "nll")
    how: Any = {"draws": draws, "progress": progress, **loop}
    held: dict[int, Federation] = {}
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(TemporaryDirectory(prefix="pyrofl-")))

        def attempt(which: int, number: int, k: int) -> Trial:
            run_seed = later(seed, k)
            if k not in held:
                held[k] = held_back(data, validation_fraction, seed=separate(run_seed).noise)
            path, same = (
                place / f"{which + 1}-{k}.safetensors",
                {"setting": describe_setting(settings[which])},
            )
            keeper = Keeper(path, every, about={**same, **(about or {})})
            if path.exists():  # from fewer rounds, or an interrupted process
                keeper.last = load(path, methods[which], held[k], keeper.about, seed=run_seed)
                keeper.written = keeper.last.state.number
            problem = _trained(methods[which], held[k], number, keeper, run_seed, how)
            return _judged(Trial(which, number, k, nan, 0.0, problem), keeper.last, by)

        trials = halved(len(settings), rounds, by, attempt, seeds)
    return TuningResult(settings, tuple(trials), by, ranked(trials, by)[0])


def refuse_metric(metric: Metric | None, data: Federation) -> None:
    """Raise ValueError if a metric does not fit the type of response: classes or numbers."""
    is_binary = not data.y.dim() > 1 and bool(((data.y == 0) | (data.y == 1)).all())
    if metric == "rmse" and data.classes:
        raise ValueError("metric is 'rmse', but y has classes; use accuracy or nll")
    if metric == "accuracy" and not data.classes and not is_binary:
        raise ValueError("metric is 'accuracy', but y has numbers; use rmse or nll")


def combinations(
    param_grid: Mapping[str, Sequence[Any]] | Sequence[Setting],
) -> tuple[Setting, ...]:
    """Return all settings of a parameter grid; raise ValueError if it is empty or has duplicates.

    >>> settings = combinations({"lr": (0.1, 0.3), "momentum": (0, 0.9)})
    >>> [describe_setting(setting) for setting in settings]
    ['lr=0.1 momentum=0', 'lr=0.1 momentum=0.9', 'lr=0.3 momentum=0', 'lr=0.3 momentum=0.9']
    """
    if isinstance(param_grid, Mapping):
        for name, values in param_grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ValueError(f"param_grid[{name!r}] is {values!r}; expected a list of values")
        settings = [
            dict(zip(param_grid, some, strict=True)) for some in product(*param_grid.values())
        ]
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


def halved(
    count: int, rounds: int, by: Metric, attempt: Callable[[int, int, int], Trial], seeds: int = 3
) -> list[Trial]:
    """Run successive halving over `count` hyperparameter settings, and return all trials.

    The three finalists are trained for all rounds with every seed; a single setting with one.
    """
    left, trials = list(range(count)), list[Trial]()
    *screens, last = rungs(count, rounds)
    for number in screens:
        trials += [attempt(which, number, 0) for which in left]
        good = ranked([one for one in trials if one.rounds == number], by)
        left = good[: max(FINALISTS, -(-len(left) // KEEP))]
    for seed in range(seeds if len(left) > 1 else 1):
        for which in left:
            if not any(one.problem for one in trials if one.setting == which):
                trials.append(attempt(which, last, seed))
    if not ranked(trials, by):
        raise AllFailed(
            f"all {count} settings fail, the first: {trials[0].problem}; try others, such as "
            "smaller learning rates"
        )
    return trials


def rungs(count: int, rounds: int) -> list[int]:
    """Return the round numbers at which successive halving compares the settings.

    >>> rungs(9, 45), rungs(10, 45), rungs(3, 20), rungs(9, 1)
    ([15, 45], [5, 15, 45], [20], [1])
    """
    often = 0
    while count > FINALISTS:
        count, often = max(FINALISTS, -(-count // KEEP)), often + 1
    return sorted({max(1, round(rounds / KEEP**k)) for k in range(often + 1)})


def _trained(
    method: Fitting, held: Federation, rounds: int, keeper: Keeper, seed: Seed, how: Any
) -> str:
    """Train for a number of rounds, evaluate and store the run; return an error text or ""."""
    if keeper.last and _row(keeper.last, rounds):
        return ""
    try:
        run = fit(
            method,
            held,
            rounds,
            seed=seed,
            resume_from=keeper.last,
            eval_every=rounds,
            callback=keeper,
            **how,
        )
        keeper.last, keeper.written = run, None  # with its scores
    except FAILS as error:
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        keeper.rescue()  # whatever ends it
    return ""


def _judged(trial: Trial, run: Run | None, by: Metric) -> Trial:
    """Add the run's score and training time to a trial, or the reason of its failure."""
    if run is None:  # not one round was made
        return trial
    records, problem, score = run.records[: trial.rounds], trial.problem, nan
    if (so_far := convergence_status(records)).kind == "diverged":
        problem = problem or str(so_far)
    if not problem:
        scores = _row(run, trial.rounds)
        kinds = {"accuracy", "rmse"} & scores.keys()
        if by not in scores and by != "nll" and kinds:
            raise ValueError(
                f"metric is {by!r}, which this method does not have; use {kinds.pop()} or nll"
            )
        score = scores.get(by, nan)
        problem = "" if isfinite(score) else f"{by} is not a finite number"
    seconds = sum(record.seconds for record in records)
    return replace(trial, score=score, seconds=seconds, problem=problem)


def _row(run: Run, rounds: int) -> dict[str, float]:
    """Return the scores of the method's default model after some number of rounds, by metric."""
    columns = (rounds, *default_model(run.method), "training")
    return {
        row["metric"]: row["value"]
        for row in run.history
        if (row["round"], row["model"], row["adaptation"], row["population"]) == columns
    }
