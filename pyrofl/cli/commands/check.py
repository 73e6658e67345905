"""The command `pyrofl check`: all problems of the clients' files before a study."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from pyrofl.data.tables.file_checks import Problem, check_files
from pyrofl.data.tables.table_files import files_of_each
from pyrofl.data.tables.wording import number_of
from pyrofl.experiments.console import REFUSED, Stopped, show
from pyrofl.files import text_tables
from pyrofl.models.regression.used_columns import formula_columns, number_columns


def check(args: Namespace) -> None:
    """Print format and problems of each file; end with exit code 2 if there are problems."""
    files = files_of_each(args.files)
    columns = tuple((args.columns or "").split(",")) if args.columns else ()
    numbers: list[str] = []
    if args.formula:
        client = args.client_column or "client"
        columns = (*columns, *formula_columns(args.formula, args.family, client))
        numbers = number_columns(args.formula, args.family)
    report = check_files(
        files,
        tuple(dict.fromkeys(columns)),
        numbers=numbers,
        client=args.client_column or "",
        **format_options(args),
    )
    show("\n".join(report.guesses))
    counted = number_of(len(files), "file")
    if not report.problems:
        show(f"no problem in {counted}")
        return
    stop(report.problems, counted)


def format_options(args: Namespace) -> dict[str, Any]:
    """Return the format of files that options name; "" is guessed."""
    separator = {"tab": "\t"}.get(args.separator, args.separator or "")
    na = tuple(args.na.split(",")) if args.na else ()
    how = {"encoding": args.encoding or "", "decimal": args.decimal or ""}
    return {"separator": separator, "na": na, **how}


def stop(problems: Sequence[Problem], counted: str) -> NoReturn:
    """Print problems with their fixes, and raise Stopped with their number."""
    rows = [one[:4] for one in problems]
    show(text_tables.table(("file", "column", "problem", "fix"), rows))
    raise Stopped(f"{number_of(len(problems), 'problem')} in {counted}; expected none", REFUSED)
