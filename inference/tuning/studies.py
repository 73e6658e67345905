"""Optuna studies of a hyperparameter search: their storage, trials and pruning.

The score of a trial is reported after each third of the rounds. Optuna's median pruner ends a trial
that is worse than the median of the completed trials after as many rounds.

Akiba, Sano, Yanase, Ohta and Koyama, "Optuna: A next-generation hyperparameter optimization
framework", KDD 2019; the pruner is that of Golovin et al., "Google Vizier", KDD 2017, section 3.2.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite, nan
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pyrofl.choices import Metric
from pyrofl.data import Federation
from pyrofl.files.checkpoint_file import refuse_differences
from pyrofl.files.link_safe_files import open_without_links
from pyrofl.inference.engine.messages import BadMessage
from pyrofl.inference.evaluation.specification import default_evaluation
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import MethodOrBuilder
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import convergence_status
from pyrofl.inference.tuning.results import Setting, TrialScore, loss_sign

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

STORAGE, LOCK = "tune.journal", ".lock"
FINALISTS = 3  # trained with all seeds, or fewer where there are fewer settings
STAGES = 3  # evaluations of a trial that may be pruned
# Attributes of studies and trials.
ABOUT_ATTRIBUTE, PROBLEM_ATTRIBUTE, SECONDS_ATTRIBUTE = "about", "problem", "seconds"
FAILS = (ArithmeticError, BadMessage, RuntimeError, ValueError)  # of diverging runs


class OtherSearch(ValueError):
    """Error raised if a folder's storage belongs to another search or cannot be used."""


def load_optuna() -> Any:
    """Import Optuna; raise ValueError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            f"tuning needs Optuna ({error}); expected pip install -e '.[tuning]' in the clone"
        ) from error
    return optuna


@contextmanager
def quiet_optuna() -> Iterator[Any]:
    """Yield Optuna, of whose log only errors are shown."""
    optuna = load_optuna()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def open_storage(
    folder: str | Path | None, metric: Metric, search: Mapping[str, Any]
) -> Iterator[Callable[[int], Study]]:
    """Open a folder's storage, or one in memory; yield k -> the study of the k-th seed.

    The file is a journal of operations; of a killed process only the last one may be incomplete.

    Raises:
        OtherSearch: if the storage belongs to a search with other settings, or cannot be used.
    """
    with quiet_optuna() as optuna:
        if folder is None:
            yield partial(load_study, optuna.storages.InMemoryStorage(), metric)
            return
        path, now = Path(folder, STORAGE), json.loads(json.dumps(search))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_incomplete_line(path)
            lock = optuna.storages.journal.JournalFileOpenLock(str(path))
            Path(f"{path}{LOCK}").unlink(missing_ok=True)  # of a killed process
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock)
            storage = optuna.storages.JournalStorage(backend)
            study = load_study(storage, metric, 0)
            if ABOUT_ATTRIBUTE not in study.user_attrs:
                study.set_user_attr(ABOUT_ATTRIBUTE, now)
            stored = study.user_attrs[ABOUT_ATTRIBUTE]
        except Exception as error:  # of the file system, JSON or Optuna
            reason = str(error).partition("\n")[0]
            cure = "expected a writable folder, with no tune.journal or one that tune wrote"
            raise OtherSearch(f"{path} cannot be used: {reason}; {cure}") from error
        try:
            refuse_differences(path, stored, now)
        except ValueError as error:
            raise OtherSearch(str(error)) from error
        yield partial(load_study, storage, metric)


def remove_incomplete_line(path: Path) -> None:
    """Create a journal, or remove the end that a killed process did not write completely."""
    with os.fdopen(open_without_links(path, os.O_RDWR), "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def load_study(storage: BaseStorage, metric: Metric, k: int) -> Study:
    """Return the study of the k-th seed, after ending trials that an interrupted process left.

    Only the study of the first seed prunes trials.
    """
    optuna = load_optuna()
    states, pruners = optuna.trial.TrialState, optuna.pruners
    study: Study = optuna.create_study(
        storage=storage,
        study_name=f"seed {k}",
        load_if_exists=True,
        direction="minimize" if loss_sign(metric) > 0 else "maximize",
        sampler=optuna.samplers.RandomSampler(0),  # not used, as all parameters are enqueued
        pruner=pruners.NopPruner() if k else pruners.MedianPruner(FINALISTS),
    )
    for _ in study.get_trials(states=(states.WAITING,)):
        study.ask()
    for trial in study.get_trials(states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
    return study


def finished_trials(study: Study) -> list[FrozenTrial]:
    """Return the trials of a study that have a score or a problem, without interrupted ones."""
    trials = study.get_trials(deepcopy=False)
    return [
        t
        for t in trials
        if t.state.name in ("COMPLETE", "PRUNED") or PROBLEM_ATTRIBUTE in t.user_attrs
    ]


def stages(rounds: int) -> list[int]:
    """Return the round numbers after which a trial is evaluated.

    >>> stages(18), stages(2)
    ([6, 12, 18], [1, 2])
    """
    return sorted({-(-rounds * stage // STAGES) for stage in range(1, STAGES + 1)})


def ask(study: Study, settings: Sequence[Setting], place: int) -> OptunaTrial:
    """Start the trial of a setting, whose values are texts for Optuna."""
    choices: dict[str, dict[str, None]] = {}
    for setting in settings:
        for name, value in setting.items():
            choices.setdefault(name, {})[str(value)] = None
    kind = load_optuna().distributions.CategoricalDistribution
    chosen = {name: str(value) for name, value in settings[place].items()}
    study.enqueue_trial(chosen)
    return study.ask({name: kind(tuple(choices[name])) for name in chosen})


def train(
    trial: OptunaTrial,
    method: MethodOrBuilder,
    held: Federation,
    stops: Sequence[int],
    metric: Metric,
    **how: Any,
) -> None:
    """Train a method, report its scores after the rounds `stops`, and end the trial.

    Args:
        trial: the trial.
        method: the method with the settings of the trial.
        held: federation with training and validation rows.
        stops: round numbers, of which the last ends the training.
        metric: metric of the scores.
        how: further arguments of `fit`.
    """
    began, run, seconds = perf_counter(), None, list[float]()
    states = load_optuna().trial.TrialState
    for stop in stops:
        run, problem = _fit(method, held, stop, run, how)
        score = _score(run, metric) if run and not problem else nan
        problem = problem or ("" if isfinite(score) else f"{metric} is not a finite number")
        seconds.append(perf_counter() - began)
        trial.set_user_attr(SECONDS_ATTRIBUTE, [*seconds])
        if problem:
            trial.set_user_attr(PROBLEM_ATTRIBUTE, problem)
            trial.study.tell(trial, state=states.FAIL)
            return
        trial.report(score, stop)
        if stop < stops[-1] and trial.should_prune():
            trial.study.tell(trial, state=states.PRUNED)
            return
    trial.study.tell(trial, score)


def _fit(
    method: MethodOrBuilder, held: Federation, rounds: int, run: Run | None, how: Mapping[str, Any]
) -> tuple[Run | None, str]:
    """Train until a round and evaluate; return the run and a problem, or ""."""
    try:
        run = fit(method, held, rounds, resume_from=run, eval_every=rounds, **how)
    except FAILS as error:
        return None, str(error).partition("\n")[0] or type(error).__name__
    status = convergence_status(run.records)
    return run, str(status) if status.kind == "diverged" else ""


def _score(run: Run, metric: Metric) -> float:
    """Return the score of the method's default model in the last evaluation of a run."""
    columns = (run.state.number, *default_evaluation(run.method), "training")
    scores = {
        row["metric"]: row["value"]
        for row in run.history
        if (row["round"], row["model"], row["adaptation"], row["population"]) == columns
    }
    kinds = {"accuracy", "rmse"} & scores.keys()
    if metric not in scores and metric != "nll" and kinds:
        raise ValueError(
            f"metric is {metric!r}, which this method does not have; use {kinds.pop()} or nll"
        )
    return float(scores.get(metric, nan))


def rows_of(one: FrozenTrial, place: int, k: int, stops: Sequence[int]) -> list[TrialScore]:
    """Return the results of a trial of the k-th seed after each of its evaluations."""
    scores = [(score, "") for _, score in sorted(one.intermediate_values.items())]
    scores += (
        [(nan, one.user_attrs[PROBLEM_ATTRIBUTE])] if PROBLEM_ATTRIBUTE in one.user_attrs else []
    )
    return [
        TrialScore(place, stop, k, score, seconds, problem)
        for stop, seconds, (score, problem) in zip(
            stops, one.user_attrs[SECONDS_ATTRIBUTE], scores, strict=False
        )
    ]


def draw_params(
    grid: Mapping[str, Any], ranges: Sequence[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Draw values from ranges and positions in lists; floats have three significant digits."""
    with quiet_optuna() as optuna:
        kinds = optuna.distributions
        space = {
            n: v if n in ranges else kinds.IntDistribution(0, len(v) - 1) for n, v in grid.items()
        }
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed % 2**32))
        for _ in range(count):
            drawn = dict(study.ask(space).params)
            for name, kind in space.items():
                if isinstance(kind, kinds.FloatDistribution) and kind.step is None:
                    drawn[name] = min(max(float(f"{drawn[name]:.3g}"), kind.low), kind.high)
            yield drawn
