"""Resuming of interrupted runs: their output folders, checkpoints and interruption messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pyrofl.cli.commands.input_files import refuse_replaced_inputs
from pyrofl.experiments.console import tell, what
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.jobs import Job
from pyrofl.experiments.methods import settings_of_method
from pyrofl.experiments.results import LAST, RESULTS
from pyrofl.experiments.tasks import Task
from pyrofl.files import checkpoint_file, run_folder, run_json
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import CHECKPOINT
from pyrofl.inference.definition.metadata import Moments, metadata_of_class
from pyrofl.inference.definition.method import Method
from pyrofl.inference.fitted_run.checkpoints import Keeper, load
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import monitor_of


@contextmanager
def open_run_folders(jobs: Sequence[Job], *above: Path) -> Iterator[None]:
    """Create or empty the output folders of fits; lock them and their parent folders `above`.

    Nothing is removed if one is refused, as is a folder whose results would replace an input file.
    """
    for folder in above or [job.path for job in jobs]:
        refuse_replaced_inputs(jobs[0].experiment, folder)
    for job in jobs:
        path, experiment = job.path, job.experiment
        for inner in (*([path] if above else []), path / "figures"):
            refuse_link(inner)
        there = any(os.path.lexists(path / name) for name in (CHECKPOINT, LAST))
        run_folder.prepare(path, experiment.overwrite or (experiment.resume and there))
        if os.path.lexists(path / "figures"):
            run_folder.prepare(path / "figures", overwrite=True)
        for name in (CHECKPOINT, *RESULTS):
            if (path / name).is_dir() and not (path / name).is_symlink():
                raise ValueError(f"{path / name} is a directory; expected a file, or nothing")
    with ExitStack() as held:
        for path in (*above, *(job.path for job in jobs)):
            if dead := held.enter_context(lock_folder(path)):
                tell(f"{dead}; taking it over\n")
        for job in jobs:
            run_folder.sweep(job.path)
            anew = job.experiment.overwrite and not job.experiment.resume
            for name in (CHECKPOINT, *RESULTS) if anew else ():
                (job.path / name).unlink(missing_ok=True)
        yield


def checkpoint_writer(job: Job, every: int | None = None) -> Keeper:
    """Return the checkpoint writer of a fit; with --resume it also holds the run to continue."""
    experiment, task = job.experiment, job.task
    about = experiment.key()
    about |= {"method": job.name, "set": settings_of_method(experiment.settings, job.name)}
    about["seed of split"] = task.split
    about["network"] = hashlib.sha256(repr(task.net.module).encode()).hexdigest()[:16]
    if not isinstance(job.method, Method):  # a schedule knows how many rounds there are
        about["rounds"] = experiment.rounds
    file, last = job.path / CHECKPOINT, job.path / LAST
    keeper = Keeper(file, experiment.checkpoint_every or every, experiment.rounds, about)
    if experiment.resume and os.path.lexists(file):
        run = load(file, job.method, task.data, about, seed=task.seeds)
        not_past(run, experiment.stop_when, file)
        every = evaluation_interval(experiment, run)
        keeper.last = as_if_never_stopped(run, every, experiment.rounds, file)
        keeper.written = run.state.number
    elif experiment.resume and last.exists():
        refuse_other_settings(last, about, task, experiment.rounds)
    elif experiment.resume:
        tell(f"{job.path} holds no run to resume; starting at round 1\n")
    return keeper


def evaluation_interval(experiment: Experiment, run: Run | None) -> int:
    """Return the rounds between evaluations, of which the default depends on the rounds.

    A resumed run without --eval-every keeps its interval if the default asks for evaluations that
    it does not have.
    """
    every = experiment.evaluation_interval
    if (
        run is None
        or experiment.eval_every
        or not missing_evaluations(run, every, experiment.rounds)
    ):
        return every
    return min((row["round"] for row in run.history), default=run.state.number + 1)


def missing_evaluations(run: Run, every: int, rounds: int) -> list[int]:
    """Return the rounds that an uninterrupted run would have evaluated, and this one has not.

    `fit` evaluates the last round itself.
    """
    number, had = run.state.number, {row["round"] for row in run.history}
    return [n for n in range(1, number) if (n % every == 0 or n == rounds) and n not in had]


def refuse_other_settings(path: Path, about: Mapping[str, Any], task: Task, rounds: int) -> None:
    """Raise ValueError if run.json records a run with other settings or with too many rounds."""
    facts = run_json.read(path)
    try:
        number, had = int(facts["rounds"]), facts["experiment"] | {"seeds": facts["seeds"]}
        had |= {
            "set": settings_of_method(had["settings"], about["method"]),
            "method": had["methods"][0],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; expected a run's facts") from error
    requested = {n: v for n, v in about.items() if n in had}
    requested["seeds"] = {"split": task.split, **vars(task.seeds)}
    checkpoint_file.refuse_differences(path, {n: had[n] for n in requested}, requested)
    refuse_fewer_rounds(rounds, number, path)


def refuse_fewer_rounds(rounds: int, number: int, path: Path) -> None:
    """Raise ValueError if the run to resume already has more rounds than requested."""
    if number > rounds:
        raise ValueError(f"--rounds is {rounds}; expected at least {number}, which {path} holds")


def not_past(run: Run, until: str | None, path: Path) -> None:
    """Raise ValueError if the run to resume is past the round at which it should have stopped."""
    judge = monitor_of(run.method, run.data)
    optimal = any(
        fact.optimal for _, fact in metadata_of_class(run.method.metadata.tensors, Moments)
    )
    for record in run.records[:-1] if until else ():
        judge.add(record)
        # One that has converged may have gone on because its objective had not.
        if judge.over and not optimal:
            raise ValueError(
                f"--stop-when is {until}, and {path} holds round {run.state.number} of a run that "
                f"was to stop after round {record.number}: {judge.status()}; expected no "
                "--stop-when, or --overwrite without --resume"
            )


def as_if_never_stopped(run: Run, every: int, rounds: int, path: Path) -> Run:
    """Return a resumed run, keeping only evaluations that an uninterrupted run would have made."""
    number = run.state.number
    refuse_fewer_rounds(rounds, number, path)
    had = {row["round"] for row in run.history}
    wanted = {n for n in range(1, number + 1) if n % every == 0 or n == rounds}
    if missing := missing_evaluations(run, every, rounds):
        raise ValueError(
            f"{path} was tested after rounds {sorted(had)}; expected --rounds and "
            f"--eval-every that ask for no others up to round {number}; {rounds} and {every} ask "
            f"for round {missing[0]}"
        )
    return run.copy(history=[row for row in run.history if row["round"] in wanted])


def save_interrupted(keeper: Keeper, ended_by: str) -> str:
    """Save the last complete round after an interruption, and return the message to print."""
    problem = ""
    try:
        keeper.rescue()
    except Exception as full:
        problem = f", and it could not be written: {what(full)}"
    number = keeper.last.state.number if keeper.last else 0
    state_text = "there is no checkpoint to continue from"
    if keeper.written:
        state_text = f"{keeper.path} holds round {keeper.written}, continue with --resume"
    return f"after round {number} of {keeper.rounds}: {ended_by}; {state_text}{problem}"
