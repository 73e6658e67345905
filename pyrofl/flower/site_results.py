"""Results of a regression at a site, after its study: posterior, page and predictions.

They have the effects of the site's own clients, which stay there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from pyrofl.data.tables.table_files import read_file
from pyrofl.experiments.regressions import frame_of, with_levels
from pyrofl.files import run_folder
from pyrofl.flower.project import Project
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.inference.posteriors import export
from pyrofl.inference.transport.message_checks import InvalidRequestError
from pyrofl.models.regression import effects
from pyrofl.models.regression.prediction import ServerRun
from pyrofl.models.regression.remote import RegressionClient
from pyrofl.reports.client_results import client_sections
from pyrofl.reports.page import page, write

PLAN_FILE, POSTERIOR_FILE, PAGE = "plan.json", "posterior.nc", "report.html"


def write_results(
    folder: Path, project: Project, client: RegressionClient, plan: Any, posterior: Any
) -> None:
    """Write posterior, plan and page of a site.

    Args:
        folder: of the regression, in the site's state.
        project: the study.
        client: the client side of the regression, with the site's rows.
        plan: last request of the agreement on columns.
        posterior: draws for ArviZ, with the effects of the site's clients.
    """
    export.save(posterior, folder / POSTERIOR_FILE)
    run_folder.write_json(folder / PLAN_FILE, {"plan": json.dumps(plan)})
    sections = client_sections(_run(project, client, plan, posterior), posterior["posterior"])
    if sections:
        write(folder / PAGE, page(project.question or "Results", sections))


def predict_table(
    folder: Path, project: Project, client: RegressionClient, path: str, owner: str | None
) -> Predictions:
    """Predict the rows of a table by the posterior draws of a site.

    Args:
        folder: of the regression, in the site's state.
        project: the study.
        client: the client side of the regression, with the site's rows.
        path: table of new rows.
        owner: client of the rows; None is a new one.

    Raises:
        ValueError: if the study has not ended at this site, or as of `effects.predict`.
    """
    if not (folder / PLAN_FILE).exists():
        raise ValueError(
            f"{folder} has no {PLAN_FILE}; expected the state of a site after the end of a study"
        )
    stored = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
    import arviz

    read: Any = arviz.from_netcdf
    posterior = read(folder / POSTERIOR_FILE)
    try:
        run = _run(project, client, json.loads(stored["plan"]), posterior)
    except InvalidRequestError as error:
        raise ValueError(
            f"{folder} is of another study file or version of pyrofl ({error}); expected those of "
            "the study"
        ) from error
    frame: pd.DataFrame = frame_of(read_file(path), project.formula)
    levels = tuple(one for one in project.levels if one.partition("=")[0] in frame)
    rows = with_levels({"rows": frame}, levels)["rows"]
    return effects.predict(run, rows, owner)


def _run(project: Project, client: RegressionClient, plan: Any, posterior: Any) -> ServerRun:
    """Return the run of a site, whose draws are those of its posterior."""
    method, data = client.build(plan)
    state = first(method_schedule(method)(0), data, project.seed)
    return ServerRun(method, data, state, project.seed, shared_draws=posterior)
