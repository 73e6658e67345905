"""Check of sites' tables before anything leaves: what `pyrofl study check` finds in them."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from pyrofl.data.frames import Tables
from pyrofl.data.tables.file_checks import ALL_FILES, Problem, check_files
from pyrofl.data.tables.table_files import files_of
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import REFUSED, Stopped, show
from pyrofl.files import text_tables
from pyrofl.flower.project import Project, of_study
from pyrofl.flower.rows import rows_of
from pyrofl.flower.rules import check_rules
from pyrofl.flower.tables import read_site_tables, regression_arguments, regression_client
from pyrofl.inference.transport.site_rules import BrokenRuleError, SiteRules
from pyrofl.models.regression.remote import RegressionServer


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore the warnings of a trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@of_study
def check(args: Namespace) -> None:
    """Print all problems of tables; raise Stopped if one would make the study wrong."""
    files = [file for path in args.files for file in files_of(path)]
    count = check_tables(args.project, files)
    try_study(args.project, files, SiteRules.read(args.rules))
    more = f"; see {number_of(count, 'warning')} above" if count else ""
    show(f"no problem in {number_of(len(files), 'file')} that would make the study wrong{more}")


def check_tables(project: Project, paths: Sequence[str]) -> int:
    """Print problems and warnings of sites' tables, and return the number of warnings.

    Raises:
        Stopped: if a problem makes the study wrong.
    """
    problems = table_problems(project, paths)
    count = sum(one.is_warning for one in problems)
    if count < len(problems):
        _stop(problems, paths)
    _print(problems, paths)
    return count


def table_problems(project: Project, paths: Sequence[str]) -> tuple[Problem, ...]:
    """Return problems and warnings of sites' tables.

    Spellings of classes are warnings, as other words than the classes are refused.
    """
    needed = [*dict.fromkeys([*project.used_columns, *filter(None, [project.client_column])])]
    problems = check_files(
        paths, needed, numbers=project.number_columns, dictionary=project.columns
    ).problems
    listed = {project.target} if project.classes else set()
    return tuple(
        one._replace(is_warning=one.is_warning or one.column in listed)
        for one in _of_groups(project, problems, len(paths))
    )


def _of_groups(project: Project, problems: Sequence[Problem], files: int) -> Iterator[Problem]:
    """Yield problems with those of the columns of groups and clients in the words of the study."""
    client, unit = project.client_column, project.unit.one if project.unit else "client"
    lacking = [one for one in problems if one.column == client and one.text == "is missing"]
    for one in problems:
        if project.formula and one in lacking:
            if len(lacking) < files or one is not lacking[0]:
                continue  # a site without the column is one client
            cure = "add it, or leave client-column out of the study file"
            yield one._replace(
                file=ALL_FILES if files > 1 else one.file, cure=cure, is_warning=files == 1
            )
        elif one.text == "is missing" and one.column in project.groups and not client:
            term = f"the {'unit is ' + unit if project.unit else 'usual word is client'}"
            yield one._replace(cure=f"add it, or write (1 | {unit}), as {term}")
        else:
            yield one


@ignore_warnings()
def try_study(project: Project, paths: Sequence[str], rules: SiteRules) -> None:
    """Raise Stopped if the rules of a site or the method refuse tables before round one.

    Warnings are those of `check_tables`, which prints them, or of the run.

    Args:
        project: the study.
        paths: table of each site.
        rules: rules of the sites.
    """
    found: list[Problem] = []
    tables: dict[str, Tables] = {}
    for path in paths:
        try:
            name = Path(path).stem
            check_rules(
                rules, project, name, None if project.formula else rows_of(project, path, name)
            )
            if project.formula:
                tables[path] = read_site_tables(project, path, name)
        except ValueError as error:
            found += _problems(Path(path).name, error)
    if project.formula and not found:
        found = _of_agreement(project, tables, rules)
    elif not found:
        project.build(len(paths), server=True)
    if found:
        _stop(found, paths)


def _of_agreement(
    project: Project, tables: Mapping[str, Tables], rules: SiteRules
) -> list[Problem]:
    """Return the problems of a regression's exchanges before round one, in this process.

    With one table, what the server refuses may be due to the tables that are elsewhere.
    """
    holders = {path: tuple(own.frames) for path, own in tables.items()}
    server = RegressionServer(project.formula, holders, **regression_arguments(project))
    clients = {path: regression_client(project, own, rules) for path, own in tables.items()}
    while not server.is_agreed:
        found, replies = list[Problem](), {}
        for path, request in server.configure_describe().items():
            try:
                replies[path] = clients[path].describe(request)
            except ValueError as error:
                found += _problems(Path(path).name, error)
        if found:
            return found
        try:
            server.aggregate_describe(replies)
        except ValueError as error:
            return _problems(ALL_FILES, error) if len(tables) > 1 else []
    return []


def _problems(file: str, error: ValueError) -> list[Problem]:
    """Return the problems that an error names, and their cures."""
    problems = []
    for one in error.every if isinstance(error, BrokenRuleError) else (error,):
        text = str(one).removeprefix(f"{Path(file).stem}: ")  # stays: the name of a ward
        problem, _, cure = text.partition("; expected ")
        problems.append(Problem(file, "", problem, cure))
    return problems


def _print(problems: Sequence[Problem], paths: Sequence[str]) -> None:
    """Print problems in a table; one file needs no column with its name."""
    if not problems:
        return
    first = int(len(paths) == 1)
    rows = [
        (one.file, one.column, f"{'warning: ' * one.is_warning}{one.text}", one.cure)[first:]
        for one in problems
    ]
    show(text_tables.table(("file", "column", "problem", "fix")[first:], rows))


def _stop(problems: Sequence[Problem], paths: Sequence[str]) -> NoReturn:
    """Print problems and warnings, and raise Stopped with their numbers."""
    _print(problems, paths)
    count = sum(one.is_warning for one in problems)
    has = f"{paths[0]} has" if len(paths) == 1 else f"{len(paths)} files have"
    more = f", and {number_of(count, 'warning')}" if count else ""
    raise Stopped(
        f"{has} {number_of(len(problems) - count, 'problem')} that would make the study "
        f"wrong{more}; expected tables as above: correct them; nothing has left",
        REFUSED,
    )
