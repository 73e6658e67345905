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
from pyrofl.files import run_folder, run_json
from pyrofl.files.link_safe_files import refuse_link
from pyrofl.files.lock import lock_folder
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models.regression import regression
from pyrofl.reports.regression_folder import ESTIMATES, POSTERIOR, RATIOS, write_regression


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
    assert method.design is not None
    refuse_replaced_inputs(experiment, folder)
    with run_folder.only_if_done(folder, folder / "figures"):
        run_folder.prepare(folder, experiment.overwrite)
        refuse_link(folder / "figures")
        run_folder.prepare(folder / "figures", overwrite=True)
        with lock_folder(folder), threads(1), _told(problems):
            family = f"family {experiment.family}, link {method.link}"
            say(experiment, f"{tables!r}; {family}; response {method.design.event}")
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
    tables, lacking, end = write_regression(
        folder,
        run,
        lambda: run.to_arviz(experiment.posterior_draws, progress=not experiment.quiet),
        facts,
        problems,
        data=experiment.data,
        question=experiment.question,
        guard=ending(lambda what: f"the results cannot be written to {folder}: {what}"),
    )
    show("\n\n".join([*tables, str(run.status)]), f"{folder} holds all results")
    results.figures_lack(folder, lacking)
    say(experiment, end)
