"""Commands `pyrofl tune` and `compare --tune`: choose settings by scores on validation rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from pyrofl import figures
from pyrofl.cli.commands import grids
from pyrofl.cli.commands.input_files import refuse_replaced_inputs
from pyrofl.cli.output.received_tables import HASH
from pyrofl.experiments import results
from pyrofl.experiments.console import Stopped, ending, say, show, tell
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.jobs import Job, jobs
from pyrofl.experiments.methods import Scheduled, methods, settings_of_method
from pyrofl.experiments.tasks import SEEDED, resolve, threads
from pyrofl.files import run_folder, run_json, text_tables
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.files.lock import lock_folder
from pyrofl.inference.tuning.results import COLUMNS, Margin, TuningResult, describe_setting
from pyrofl.inference.tuning.studies import LOCK, STORAGE, OtherSearch, load_optuna
from pyrofl.inference.tuning.tune import AllFailed, refuse_metric
from pyrofl.inference.tuning.tune import tune as choose

FACTS, TABLE, FIGURE = "tune.json", "tune.csv", "tune"
FOLDER = "tune"  # behind the method's name, in the folder of a comparison


@dataclass(frozen=True)
class Search:
    """Search for the settings of one method with the best validation score."""

    job: Job  # with the settings that --set gives
    fixed: tuple[str, ...]  # these settings
    path: Path  # of the folder of what comes out

    def build(self, **setting: str) -> Scheduled:
        """Build the method that is tuned, with the given settings."""
        job, words = self.job, [f"{name}={text}" for name, text in setting.items()]
        every = [*settings_of_method(self.fixed, job.name), *words]
        return methods([job.name], every, job.task, job.experiment.rounds)[job.name]

    @cached_property
    def settings(self) -> list[grids.SettingTexts]:
        """All combinations of settings that the search tries."""
        one, name = self.job.experiment, self.job.name
        return grids.settings_to_try(
            name, one.over, one.trials, self.build, self.fixed, self.job.task.seed
        )

    @property
    def about(self) -> dict[str, Any]:
        """Inputs that determine the result of a search for settings, as JSON-compatible values."""
        experiment, task = self.job.experiment, self.job.task
        return experiment.key() | {
            "method": self.job.name,
            "rounds": experiment.rounds,
            "settings": self.settings,
            "set": settings_of_method(self.fixed, self.job.name),
            "validation fraction": experiment.validation_fraction,
            "tune seeds": experiment.tune_seeds,
            "metric": experiment.metric,
            "seeds": {"split": task.split, **vars(task.seeds)},
        }


def tune(experiment: Experiment) -> None:
    """Choose a method's settings by their validation scores, and write the result to a folder."""
    load_optuna()
    experiment = resolve(experiment)
    figures.try_out()
    (job,) = jobs(experiment, [experiment.seed])
    path = Path(experiment.out or f"runs/tune-{job.name}-{experiment.seed}")
    search = Search(job, tuple(experiment.settings), path)
    refuse_metric(experiment.metric, job.task.data)
    refuse_replaced_inputs(experiment, path)
    own = rf"tune\.(csv|json)|figures|{STORAGE}({LOCK})?" if experiment.resume else ""
    say(experiment, f"{len(search.settings)} settings of {job.name}, {until(search)}")
    run_folder.prepare(path, experiment.overwrite, own)
    with lock_folder(path) as dead:
        if dead:
            tell(f"{dead}; taking it over\n")
        result = done(search)
        lines = "\n".join(["", *sentences(search, result), f"{command(search, result)}"])
        show(f"{table(result)}\n{lines}", f"{path} holds {TABLE}")
        results.figures_lack(path, drawn_of(search, result))
        say(experiment, f"{path} holds {TABLE}, {FACTS} and a figure")


def searches(experiment: Experiment, jobs_to_tune: Sequence[Job]) -> list[Search]:
    """Return the searches for settings of `compare --tune`, one per method, with its first seed."""
    if not experiment.tune:
        for flag, dest in (("--trials", "trials"), ("--metric", "metric")):
            if getattr(experiment, dest) is not None:
                raise ValueError(f"{flag} is given, and --tune is not; expected both")
        return []
    load_optuna()
    if experiment.privacy:
        raise ValueError(
            "--tune is given, and --privacy: what is tried spends privacy too, which epsilon does "
            "not count; expected one of them, and settings chosen on other data"
        )
    seeded = experiment.data.partition(":")[0] in SEEDED and experiment.split_seed is None
    if seeded and experiment.seeds > 1:
        raise ValueError(
            "--tune with several seeds, and each draws other test rows, among which those are "
            "that another holds back; expected --split-seed S, or --seeds 1"
        )
    first = list({job.name: job for job in reversed(jobs_to_tune)}.values())[::-1]
    fixed = tuple(experiment.settings)
    search_list = [
        Search(job, fixed, Path(str(experiment.out), f"{job.name}-{FOLDER}")) for job in first
    ]
    for search in search_list:  # refused before any work
        refuse_metric(experiment.metric, search.job.task.data)
        _ = search.settings
    return search_list


def all_done(some: Sequence[Search]) -> tuple[list[str], dict[str, str]]:
    """Tune several methods; return their chosen settings for --set, and a description of each."""
    words, text = list[str](), dict[str, str]()
    for search in some:
        experiment, name = search.job.experiment, search.job.name
        refuse_link(search.path)
        run_folder.prepare(search.path, overwrite=True)
        try:
            found = done(search)
        except Stopped as stop:
            if not isinstance(stop.__cause__, AllFailed):
                raise
            say(experiment, f"{name}: {stop}; its own settings are taken")
            text[name] = "none: all failed"
            continue
        say(experiment, f"{name}: {' '.join(sentences(search, found))}")
        words += [f"{name}.{n}={v}" for n, v in found.best.items()]
        text[name] = describe_setting(found.best)
        drawn_of(search, found)
    return words, text


def done(search: Search) -> TuningResult:
    """Run a search for the best settings, or continue it if a command is resumed."""
    job, path, experiment = search.job, search.path, search.job.experiment
    if experiment.overwrite and not experiment.resume:
        for name in (FACTS, TABLE, STORAGE, f"{STORAGE}{LOCK}"):
            (path / name).unlink(missing_ok=True)
    run_folder.sweep(path)
    note = f"; {path} holds what there is, continue with --resume"
    with (
        threads(experiment.threads),
        ending(lambda what: f"{job.name}: {what}{note}", OtherSearch),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".* widen the grid", UserWarning)  # `sentences` has it
        result = choose(
            search.build,
            job.task.data,
            search.settings,
            experiment.rounds,
            metric=experiment.metric,
            validation_fraction=experiment.validation_fraction,
            folder=path,
            seeds=experiment.tune_seeds,
            about=search.about,
            **job.training_options,
        )
        run_folder.write_csv(path / TABLE, COLUMNS, result.rows())
        content = facts(search, result)
        run_folder.write_json(path / FACTS, content | {HASH: run_json.hash_of_facts(content)})
    return result


def facts(search: Search, result: TuningResult) -> dict[str, Any]:
    """Return the content of tune.json, the result of a search for settings."""
    none = {"score": None}  # of NaN and infinity, which JSON lacks
    trials = [asdict(t) | ({} if isfinite(t.score) else none) for t in result.trials]
    return {
        "about": search.about,
        "versions": run_folder.versions(),
        "command": command(search, result),
        "metric": result.metric,
        "chosen": result.best,
        "place": result.chosen,
        "score": result.score,
        "margins": [margin(result, one) for one in result.margins],
        "rounds": result.total_rounds,
        "seconds": result.total_seconds,
        "trials": trials,
    }


def margin(result: TuningResult, one: Margin) -> dict[str, Any]:
    """Return how far a finalist scored below the best setting, as JSON-compatible values."""
    error = one.error if isfinite(one.error) else None
    return {**asdict(one), "setting": result.settings[one.setting], "error": error}


def until(search: Search) -> str:
    """Describe the validation rows by which settings are chosen."""
    share = f"{search.job.experiment.validation_fraction:g} of the training rows of every client"
    return f"chosen on {share}, as validation rows; test rows are not used"


def sentences(search: Search, result: TuningResult) -> Iterator[str]:
    """Describe the chosen settings, their margin over others, and the cost of the search."""
    best = describe_setting(result.best)
    yield f"{best} is the best of {len(result.settings)} settings, {until(search)}:"
    cost = f"{result.total_rounds} rounds, {result.total_seconds:.1f} s"
    yield f"{result.metric} {result.score:.4f} there, {cost}."
    if result.margin_text:
        yield f"Its margin is {result.margin_text}."
    yield from (f"Warning: {text}." for text in result.edge_warnings)


def table(result: TuningResult) -> str:
    """Format a table of all trials (fits with one setting each) of a search for settings."""
    lines = []
    for (name, *_, chosen, _), t in zip(result.rows(), result.trials, strict=True):
        score, mark = None if t.problem else t.score, "*" if chosen else ""
        lines.append((name, t.rounds, t.seed, score, t.seconds, mark, t.problem))
    head = ("setting", "rounds", "seed", result.metric, "seconds", "chosen", "problem")
    return text_tables.table(head, lines)


def command(search: Search, result: TuningResult) -> str:
    """Return the command line that runs the method with the chosen settings."""
    chosen = (f"{n}={v}" for n, v in result.best.items())
    fitted = replace(search.job.experiment, settings=(*search.fixed, *chosen))
    return fitted.command(["run", search.job.name], search.job.task.seed)


def drawn_of(search: Search, result: TuningResult) -> list[str]:
    """Plot the scores of all tuning trials; return the names of figures that failed."""
    return results.drawn(
        search.path, [(FIGURE, lambda: figures.tuning(result.frame(), result.metric))]
    )
