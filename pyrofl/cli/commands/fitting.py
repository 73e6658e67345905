"""Commands `pyrofl run`, `pyrofl compare` and `pyrofl partition`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from pyrofl import figures
from pyrofl.cli.commands import benefit, tune
from pyrofl.cli.commands.input_files import refuse_replaced_input
from pyrofl.cli.commands.preflight import preflight
from pyrofl.cli.commands.resuming import (
    checkpoint_writer,
    evaluation_interval,
    open_run_folders,
    save_interrupted,
)
from pyrofl.experiments import results
from pyrofl.experiments.comparison import CompareRow, compare_rows, compare_table
from pyrofl.experiments.console import FAILED, UNLEARNED, Stopped, ending, say, show
from pyrofl.experiments.experiment import MAX_UNREQUESTED, Experiment
from pyrofl.experiments.jobs import Job, jobs
from pyrofl.experiments.methods import builds
from pyrofl.experiments.results import failure_reason
from pyrofl.experiments.tasks import resolve, split, threads
from pyrofl.files import run_folder
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.inference.engine.messages import count_by_rule
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run import loggers
from pyrofl.inference.fitted_run.checkpoints import Keeper
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.fitted_run.saving import settings_of_run
from pyrofl.partitions.federations import class_counts

COMPARISON = ("compare.csv", "figures/curves.png", "figures/comparison.png")
# What other commands say of a comparison.
COMPARISON_FILES = benefit.BENEFIT_FILE, benefit.BENEFIT_FIGURE, results.PAGE
SUFFIXES = (".png", ".pdf", ".svg")


def run(experiment: Experiment) -> None:
    """Fit one method, and write all results into its output folder."""
    experiment = resolve(experiment)
    (job,) = preflight(jobs(experiment, [experiment.seed]))
    with run_folder.only_if_done(job.path, job.path / "figures"), open_run_folders([job]):
        say(experiment, results.about(job.task.data, job.task.likelihood, experiment))
        done, scores, missing_evaluations = fit_and_save(
            job, checkpoint_writer(job, experiment.rounds)
        )
    show(results.score_table(scores, done.privacy), f"{job.path} holds all results")
    if problem := failure_reason(done):
        raise Stopped(f"{job.path} holds what there is of a run: {problem}", UNLEARNED)
    results.figures_lack(job.path, missing_evaluations)
    say(experiment, f"{job.path} holds tables, posterior and figures")


def compare(experiment: Experiment) -> None:
    """Fit several methods with several seeds on the same clients, and write all results.

    With --tune the settings of each are chosen first. A run that fails is named in the end, and
    the others are compared; so is one that diverged or aggregated no update, which is compared too.
    An interrupt ends all.
    """
    experiment = resolve(replace(experiment, out=experiment.out or "runs/compare"))
    folder = Path(str(experiment.out))
    seeds = range(experiment.seed, experiment.seed + experiment.seeds)
    selected = preflight(jobs(experiment, seeds, folder))
    searches = tune.searches(experiment, selected)
    left = rf"compare\.csv|benefit\.csv|report\.html|figures|({'|'.join(builds())})-(\d+|tune)"
    drawn, paths = folder / "figures", [job.path for job in selected]
    with run_folder.only_if_done(folder, drawn, *paths), ExitStack() as held:
        run_folder.prepare(folder, experiment.overwrite, left if experiment.resume else "")
        refuse_link(drawn)
        run_folder.prepare(drawn, overwrite=True)
        held.enter_context(open_run_folders(selected, folder))
        if searches:
            words, chosen = tune.all_done(searches)
            experiment = replace(experiment, settings=(*experiment.settings, *words))
            selected = preflight(jobs(experiment, seeds, folder))
            selected = [replace(job, tuned=chosen[job.name]) for job in selected]
        fit_all(experiment, selected, folder)


def fit_all(experiment: Experiment, fits: Sequence[Job], folder: Path) -> None:
    """Fit all methods and seeds of a comparison, then write and print the results."""
    # Each leaves a checkpoint, so that those which are done need not be done again.
    keepers = [checkpoint_writer(job, experiment.rounds) for job in fits]
    run_folder.sweep(folder)
    for name in (*COMPARISON, *COMPARISON_FILES):
        (folder / name).unlink(missing_ok=True)
    finals: list[CompareRow] = []
    history: list[dict[str, object]] = []
    say(experiment, results.about(fits[0].task.data, fits[0].task.likelihood, experiment))
    failed, lost, missing_evaluations = list[str](), list[str](), list[str]()
    open_runs = set[tuple[str, int]]()  # that have not converged
    for job, keeper in zip(fits, keepers, strict=True):
        try:
            done, scores, lack = fit_and_save(job, keeper)
        except Stopped as stop:
            if stop.code != FAILED:
                raise
            failed.append(f"{job.path.name} {stop}")
        else:
            finals += compare_rows(job.name, job.task.seed, done, scores, job.tuned)
            lost += [f"{job.path.name} {problem}"] if (problem := failure_reason(done)) else []
            of = {"method": job.name, "seed": job.task.seed}
            open_runs |= {(job.name, job.task.seed)} if done.status.kind != "converged" else set()
            history += [{**row, **of} for row in done.history]
            missing_evaluations += lack
        keeper.last = None  # what clients keep may be large
    if finals:
        checkpoints = f"{folder} holds their checkpoints, continue with --resume"
        with ending(lambda what: f"after all runs: {what}; {checkpoints}"):
            missing_evaluations += write_comparison(
                folder, finals, history, results.main_metric(scores)
            )
        show(compare_table(finals, open_runs), f"{folder} holds all results")
    message = f"{len(lost)} of {len(fits)} runs diverged or aggregated no update: {'; '.join(lost)}"
    if failed:
        also = f"; {message}" if lost else ""
        message = f"{len(failed)} of {len(fits)} runs failed: {'; '.join(failed)}{also}"
        raise Stopped(message, FAILED)
    for keeper in () if experiment.checkpoint_every else keepers:
        keeper.path.unlink(missing_ok=True)
    if lost:
        raise Stopped(message, UNLEARNED)
    results.figures_lack(folder, missing_evaluations)
    say(experiment, f"{folder} holds compare.csv, figures and a folder for each method and seed")


def write_comparison(
    folder: Path, finals: list[CompareRow], history: list[dict[str, object]], metric: str
) -> list[str]:
    """Write the table and figures of a method comparison; return the names of failed figures."""
    run_folder.write_csv(folder / COMPARISON[0], run_folder.COMPARE, finals)
    rows = [dict(zip(run_folder.COMPARE, row, strict=True)) for row in finals]
    curves = ("curves", lambda: figures.curves(history, metric))
    return results.drawn(folder, [curves, ("comparison", lambda: figures.comparison(rows, metric))])


def partition(experiment: Experiment) -> None:
    """Plot the number of rows of each client and class, and save the figure."""
    experiment = resolve(experiment)
    path = Path(str(experiment.out))
    run_folder.refuse_no_output(path, SUFFIXES, experiment.overwrite)
    refuse_replaced_input(experiment, path)
    dataset, data = split(experiment, experiment.seed)
    counts = class_counts(data)
    figures.try_out()
    run_folder.prepare(path.parent, overwrite=True)
    with ending(lambda what: f"{path} cannot be drawn: {what}"):
        figures.save(figures.partition(counts, data.names, data.classes), path)
    sizes = data.sizes
    show(
        f"{results.about(data, dataset.likelihood, experiment)}\n"
        f"{experiment.partition} of {experiment.data}: {len(sizes)} clients of {sizes.min()} to "
        f"{sizes.max()} training rows, {float(sizes.double().mean()):.1f} on average",
        f"{path} is drawn",
    )


def fit_and_save(job: Job, keeper: Keeper) -> tuple[Run, list[Scores], list[str]]:
    """Fit and evaluate a method, and write its results; return run, scores and failed figures."""
    experiment, task, data = job.experiment, job.task, job.task.data
    of = f"{experiment.partition} of {experiment.data}"
    say(experiment, f"{job.name}, seed {task.seed}: {data.clients} clients, {of}{groups_note(job)}")
    if keeper.written:
        say(experiment, f"{keeper.path} holds round {keeper.written}; continuing from there")
    with threads(experiment.threads), ending(partial(save_interrupted, keeper)):
        done = fit(
            job.method,
            data,
            experiment.rounds,
            resume_from=keeper.last,
            eval_every=evaluation_interval(experiment, keeper.last),
            stop_when=experiment.stop_when,
            callback=keeper,
            logger=logger(job),
            **job.training_options,
        )
        if keeper.every:  # it may have stopped before the last of all rounds
            keeper.rescue()
        scores = done.evaluate_all()
        if scores[0].part == "train":
            say(experiment, "no client has test rows: all scores are of training rows")
        settings = settings_of_run(data, done.seed, keeper.about)
        missing_evaluations = results.save(job, done, scores, settings)
    reasons = [reason for record in done.records for reason in record.rejected]
    bad = Counter(
        (rejected_sender(r, data.names), kind) for r in reasons for kind in count_by_rule([r])
    )
    for (client, kind), times in bad.items():
        rejection = f"rejected in {times} of {done.state.number} rounds; expected {kind}"
        say(experiment, f"{client}: {rejection}")
    return done, scores, missing_evaluations


def logger(job: Job) -> loggers.Log | None:
    """Return the logger that --log selects (TensorBoard or MLflow), or None."""
    if job.experiment.log == "tensorboard":
        return loggers.tensorboard(job.path / "tensorboard")
    return loggers.mlflow(str(job.path)) if job.experiment.log else None


def groups_note(job: Job) -> str:
    """Return a note on the ArviZ groups saved in posterior.nc; "" if the user selected them."""
    if job.experiment.arviz_groups or not job.experiment.posterior_draws:
        return ""
    if job.groups == "all":
        return "; posterior.nc: all ArviZ groups"
    return (
        f"; posterior.nc: {' and '.join(job.groups)} only, as other groups have more than "
        f"{MAX_UNREQUESTED:,} numbers (add them by --arviz-groups all)"
    )


def rejected_sender(reason: str, names: Sequence[str]) -> str:
    """Return the client named at the start of the reason for a rejection, else "the server".

    >>> reason = "ward 3: left: tau is nan; expected a finite number"
    >>> rejected_sender(reason, ["ward 3", "ward 3: left"])
    'ward 3: left'
    """
    return max((n for n in names if reason.startswith(f"{n}: ")), key=len, default="the server")
