"""The command `pyrofl regress`: a multilevel regression from a formula, with an HTML page."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyrofl.cli.commands.input_files import refuse_replaced_inputs
from pyrofl.experiments import results
from pyrofl.experiments.console import UNLEARNED, Stopped, ending, say, show, tell
from pyrofl.experiments.regressions import RegressionExperiment, read_priors, read_tables
from pyrofl.experiments.results import LAST
from pyrofl.experiments.tasks import threads
from pyrofl.files import run_folder, run_json, text_tables
from pyrofl.files.lock import locked
from pyrofl.files.own_files import refuse_link
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run import saving
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors import export
from pyrofl.models.regression import regression
from pyrofl.reports import parameters
from pyrofl.reports.page import page, write

ESTIMATES, RATIOS, POSTERIOR = "estimates.csv", "ratios.csv", "posterior.nc"


def regress(args: Namespace) -> None:
    """Fit a regression to tables of clients; print estimates, and write a folder with a page."""
    options: Any = vars(args) | {"rounds": args.rounds or 0, "methods": ()}
    experiment = RegressionExperiment.of(Namespace(**options))
    folder = Path(experiment.out or f"runs/regression-{experiment.seed}")
    problems: list[str] = []
    with _told(problems):
        tables = read_tables(experiment)
        method = regression(
            experiment.formula,
            tables,
            family=experiment.family,
            link=experiment.link,
            priors=read_priors(experiment.priors),
            weights=experiment.row_weights,
            client=experiment.client,
        )
    refuse_replaced_inputs(experiment, folder)
    with run_folder.only_if_done(folder, folder / "figures"):
        run_folder.prepare(folder, experiment.overwrite)
        refuse_link(folder / "figures")
        run_folder.prepare(folder / "figures", overwrite=True)
        with locked(folder), threads(1), _told(problems):
            say(experiment, f"{tables!r}; family {experiment.family}, link {method.link}")
            with ending(lambda what: f"the regression ended: {what}"):
                run = fit(
                    method,
                    tables,
                    experiment.rounds or None,
                    seed=experiment.seed,
                    progress=not experiment.quiet,
                )
            _write(experiment, folder, run, problems)


@contextmanager
def _told(problems: list[str]) -> Iterator[None]:
    """Print each warning of the `with` block in one line, and add it to the problems."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for one in caught:
                text = " ".join(str(one.message).split())
                if issubclass(one.category, UserWarning) and text not in problems:
                    problems.append(text)
                    tell(f"warning: {text}\n")


def _write(experiment: RegressionExperiment, folder: Path, run: Run, problems: list[str]) -> None:
    """Write tables, posterior, figures and the page of a run, and print its estimates."""
    for name in (LAST, ESTIMATES, RATIOS, POSTERIOR, results.PAGE, run_folder.CHECKPOINT):
        (folder / name).unlink(missing_ok=True)
    named: Any = {"methods": (run.method.name,), "out": str(folder)}
    experiment = replace(experiment, rounds=run.state.number, **named)
    facts = results.facts_of(experiment, run, (), experiment.seed, experiment.family)
    if run.status.kind == "diverged":
        run_json.write(folder, facts, ())
        raise Stopped(f"{folder} holds what there is of a run: {run.status}", UNLEARNED)
    with ending(lambda what: f"the results cannot be written to {folder}: {what}"):
        posterior = run.to_arviz(experiment.posterior_draws, progress=not experiment.quiet)
        parameter_tables = parameters.estimates(run, posterior)
        _csv(folder / ESTIMATES, "parameter", parameter_tables.table)
        if parameter_tables.ratios is not None:
            _csv(folder / RATIOS, str(parameter_tables.ratios.index.name), parameter_tables.ratios)
        export.save(posterior, folder / POSTERIOR)
        saving.save(run, folder / run_folder.CHECKPOINT)
        run_json.write(folder, facts, (ESTIMATES, RATIOS, POSTERIOR))
        drawings = list(parameters.drawings(run, parameter_tables))
        lacking = results.drawn(folder, [(name, make) for name, _, make in drawings])
    problems += [text for text in run.warnings if text not in problems]
    drawn = [(name, text, folder / f"figures/{name}.png") for name, text, _ in drawings]
    drawn = [one for one in drawn if one[2].is_file()]
    sections_of_page = parameters.sections(run, parameter_tables, drawn, problems, experiment.data)
    title = experiment.question or parameters.question(run)
    end = write(folder / results.PAGE, page(title, sections_of_page))
    parts = [_text("parameter", parameter_tables.table.iloc[:, [0, 1, 3, 4]])]
    parts += (
        []
        if parameter_tables.ratios is None
        else [_text(str(parameter_tables.ratios.index.name), parameter_tables.ratios)]
    )
    show("\n\n".join([*parts, str(run.status)]), f"{folder} holds all results")
    results.figures_lack(folder, lacking)
    say(experiment, end)


def _csv(path: Path, first: str, table: Any) -> None:
    run_folder.write_csv(path, (first, *table.columns), [(n, *v) for n, v in _lines(table)])


def _text(first: str, table: Any) -> str:
    return text_tables.table((first, *table.columns), [(n, *v) for n, v in _lines(table)])


def _lines(table: Any) -> list[tuple[str, list[float]]]:
    return [(str(name), [float(v) for v in values]) for name, values in table.iterrows()]
