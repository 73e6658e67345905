"""Check of a site's table before anything leaves: what `pyrofl check` finds in it."""

from __future__ import annotations

from pyrofl.data.tables.file_checks import check_files
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import REFUSED, Stopped, show
from pyrofl.files import text_tables
from pyrofl.flower.project import Project
from pyrofl.models.regression.used_columns import formula_columns, number_columns


def check_table(project: Project, path: str) -> None:
    """Print the problems of a site's table; raise Stopped if one makes the study wrong.

    Spellings in columns whose levels the project lists are warnings, as other levels are refused.
    """
    if path.lower().endswith(".parquet"):
        return
    columns, numbers = used_columns(project)
    problems = check_files([path], columns, numbers=numbers).problems
    if not problems:
        return
    show(text_tables.table(("column", "problem", "fix"), [one[1:4] for one in problems]))
    listed = {text.partition("=")[0] for text in project.levels}
    listed |= {project.target} if project.classes else set()
    wrong = [one for one in problems if not one.is_warning and one.column not in listed]
    if wrong:
        raise Stopped(
            f"{path} has {number_of(len(wrong), 'problem')} that would make the study wrong; "
            "correct the file: nothing has left",
            REFUSED,
        )


def used_columns(project: Project) -> tuple[list[str], list[str]]:
    """Return the columns of a study's tables, and those that must hold numbers."""
    client = project.client_column
    if project.formula:
        used = formula_columns(project.formula, project.family, client or "client")
        return used, number_columns(project.formula, project.family)
    numbers = [*project.features, *([] if project.classes else [project.target])]
    return [*project.features, project.target, *([client] if client else [])], numbers
