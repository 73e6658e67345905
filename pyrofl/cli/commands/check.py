"""The command `pyrofl check`: all problems of the clients' files before a study."""

from __future__ import annotations

import os
import re
from argparse import Namespace

from pyrofl.data.tables.file_checks import check_files
from pyrofl.data.tables.table_files import files_of
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import REFUSED, Stopped, show
from pyrofl.files import text_tables
from pyrofl.models.regression.columns import variables
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import read_all

NON_FUNCTION_NAMES = re.compile(r"[A-Za-z_][\w.]*(?![\w.]*\()")  # but of functions


def check(args: Namespace) -> None:
    """Print format and problems of each file; end with exit code 2 if there are problems."""
    files = [
        file for path in args.files for file in (files_of(path) if os.path.isdir(path) else [path])
    ]
    columns = tuple((args.columns or "").split(",")) if args.columns else ()
    numbers: list[str] = []
    if args.formula:
        client = args.client_column or "client"
        columns = (*columns, *formula_columns(args.formula, args.family, client))
        if family_of(args.family).support not in ("binary", "levels"):
            parts = read_all(args.formula, family_of(args.family).auxiliary)
            numbers = NON_FUNCTION_NAMES.findall(parts.response)
    na = tuple((args.na or "").split(",")) if args.na else ()
    report = check_files(
        files,
        tuple(dict.fromkeys(columns)),
        numbers=numbers,
        client=args.client_column or "",
        separator={"tab": "\t"}.get(args.separator, args.separator or ""),
        encoding=args.encoding or "",
        decimal=args.decimal or "",
        na=na,
    )
    show("\n".join(report.guesses))
    counted = number_of(len(files), "file")
    if not report.problems:
        show(f"no problem in {counted}")
        return
    show(text_tables.table(("file", "column", "problem", "fix"), report.problems))
    raise Stopped(
        f"{number_of(len(report.problems), 'problem')} in {counted}; expected none", REFUSED
    )


def formula_columns(formula: str, family: str, client: str = "client") -> list[str]:
    """Return the columns of the tables that a formula uses, without that of the clients.

    >>> formula_columns("censored(time, died) ~ log(age) + sex + (1 | client/ward)", "weibull")
    ['age', 'died', 'sex', 'time', 'ward']
    """
    parts = read_all(formula, family_of(family).auxiliary)
    right = [parts.population, *(group.text for group in parts.groups)]
    names = set().union(*(variables(text)[0] for text in right))
    left = " ".join([parts.response, *parts.columns.values()])
    names |= {*NON_FUNCTION_NAMES.findall(left)}
    groups = {name for group in parts.groups for name in group.factors}
    return sorted(names - groups - {client}) + sorted(groups - {client})
