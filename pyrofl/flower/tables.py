"""Tables of a site of a Flower study with a formula, and the regression's arguments."""

from __future__ import annotations

from typing import Any

from pyrofl.data.frames import Tables, place_of
from pyrofl.data.tables.table_files import read_file
from pyrofl.experiments.regressions import frame_of, read_priors, with_levels
from pyrofl.flower.project import Project
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.models.regression.remote import RegressionClient


def read_site_tables(project: Project, path: str, name: str) -> Tables:
    """Read a site's table; with a client column, its clients are named "SITE/GROUP"."""
    words = " ".join([project.formula, *project.priors])
    frame, column = frame_of(read_file(path), words), project.client_column
    if not column or column not in frame:
        frames = {name: frame}
    else:
        if frame[column].isna().any():
            place = place_of(frame, int(frame[column].isna().argmax()))
            raise ValueError(f"{path}: column {column} is empty in {place}; expected a name")
        parts = frame.groupby(column, sort=True)
        frames = {f"{name}/{key}": rows.drop(columns=column) for key, rows in parts}
    return Tables(with_levels(frames, project.levels))


def regression_arguments(project: Project) -> dict[str, Any]:
    """Return the arguments of a study's regression, for both sides."""
    return {
        "family": project.family,
        "link": project.link or None,
        "priors": read_priors(project.priors),
        "client": project.client_name,
    }


def regression_client(
    project: Project, tables: Tables, rules: SiteRules | None
) -> RegressionClient:
    """Return the client side of a study's regression, which has the rules of the site."""
    return RegressionClient(project.formula, tables, rules=rules, **regression_arguments(project))
