"""Check of a site's table before anything leaves: what `pyrofl study check` finds in it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from pyrofl.data.tables.file_checks import check_files
from pyrofl.data.tables.table_files import files_of
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import REFUSED, Stopped, show
from pyrofl.files import text_tables
from pyrofl.flower.project import Project, of_study


@of_study
def check(args: Namespace) -> None:
    """Print all problems of tables; raise Stopped if one would make the study wrong."""
    files = [file for path in args.files for file in files_of(path)]
    check_tables(args.project, files)
    show(f"no problem in {number_of(len(files), 'file')} that would make the study wrong")


def check_tables(project: Project, paths: Sequence[str]) -> None:
    """Print the problems of sites' tables; raise Stopped if one makes the study wrong.

    Spellings of classes are warnings, as other words than the classes are refused.
    """
    paths = [path for path in paths if not path.lower().endswith(".parquet")]
    problems = check_files(
        paths, project.used_columns, numbers=project.number_columns, dictionary=project.columns
    ).problems
    if not problems:
        return
    first = int(len(paths) == 1)  # one file needs no column with its name
    head, rows = ("file", "column", "problem", "fix")[first:], [one[first:4] for one in problems]
    show(text_tables.table(head, rows))
    listed = {project.target} if project.classes else set()
    if wrong := [one for one in problems if not one.is_warning and one.column not in listed]:
        has = f"{paths[0]} has" if len(paths) == 1 else f"{len(paths)} files have"
        raise Stopped(
            f"{has} {number_of(len(wrong), 'problem')} that would make the study wrong; expected "
            "tables as above: correct them; nothing has left",
            REFUSED,
        )
