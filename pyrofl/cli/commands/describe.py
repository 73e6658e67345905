"""The command `pyrofl describe`: Table 1 by client and of all rows, from sums and counts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from pyrofl.cli.commands.check import format_options, stop
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.cross_tables import describe_cross_table
from pyrofl.data.tables.description import (
    ALL_CLIENTS,
    clients_without_moments,
    describe_tables,
    table_rows,
)
from pyrofl.data.tables.dictionary import ColumnEntry, with_levels
from pyrofl.data.tables.file_checks import match_columns, read_tables, usual_columns
from pyrofl.data.tables.table_files import files_of
from pyrofl.data.tables.wording import listed, number_of
from pyrofl.experiments.console import show
from pyrofl.files import text_tables
from pyrofl.flower.project import Project
from pyrofl.inference.transport.site_rules import SiteRules


def describe(args: Namespace) -> None:
    """Print counts, means, standard deviations, quartiles and levels of columns."""
    rules, files = SiteRules.read(args.rules), files_of(args.path)
    project = Project.read(args.study) if args.study else None
    client = args.client_column or (project.client_column if project else "")
    columns = tuple(args.columns.split(",")) if args.columns else ()
    if project and not columns:
        columns = tuple(n for n in project.used_columns if n not in (client, project.client_name))
    tables, formats, problems = read_tables(files, client, **format_options(args))
    columns, entries = columns or usual_columns(tables), project.columns if project else {}
    pair = tuple(args.cross.split(",")) if args.cross else ()
    if pair and len(set(pair)) != 2:
        raise ValueError(f"--cross is {args.cross!r}; expected two columns, such as sex,arm")
    columns = tuple(dict.fromkeys((*columns, *pair)))
    spellings = list(problems)
    used = match_columns(tables, columns, entries, spellings)
    notes = [one for one in spellings if one.cure == f"rename it {one.column}"]
    if refused := [one for one in spellings if one not in notes]:
        stop(refused, number_of(len(files), "file"))
    used, other_words = _spelled(used, entries)
    named = {name if client else Path(name).stem: table for name, table in used.items()}
    described = describe_tables(named, columns, rules)
    if len(pair) == 2:
        described += describe_cross_table(named, pair, rules)
    head = ("column", "statistic", *named, ALL_CLIENTS)
    legend = (
        f"- is a number of fewer than {rules.min_level_rows} rows, or would reveal one, or has an "
        "error above one sd; numbers with ± are within this error; do not publish descriptions of "
        "tables that differ in a few rows: differences reveal them"
    )
    lacking = clients_without_moments(described.entries, [*named])
    lines = [f"{name}: all is without {listed(some)}" for name, some in lacking.items()]
    lines += [
        f"{client}: {later} is suppressed, as it equals {earlier}, or a linear function of it, in "
        f"all but fewer than {rules.min_level_rows} rows"
        for client, copies in described.near_copies.items()
        for later, earlier in copies.items()
    ]
    lines += [f"{one.file}: {one.column} {one.text}" for one in notes] + other_words
    lines += [f"{Path(path).name}: {form}" for path, form in formats.items() if not form.is_usual]
    printed = text_tables.table(head, table_rows(described.entries, [*named]))
    show("\n".join([printed, legend, *lines]))


def _spelled(
    tables: Mapping[str, Mapping[str, Column]], dictionary: Mapping[str, ColumnEntry]
) -> tuple[dict[str, dict[str, Column]], list[str]]:
    """Return tables with the dictionary's words for levels, and lines on the other words."""
    result, lines = dict[str, dict[str, Column]](), list[str]()
    for table_name, table in tables.items():
        result[table_name] = dict(table)
        for name in table.keys() & dictionary.keys():
            if levels := dictionary[name].levels:
                result[table_name][name], other = with_levels(table[name], levels)
                words = listed([f"{word} as {level}" for word, level in other.items()])
                lines += [f"{table_name}: {name} counts {words}"] if other else []
    return result, sorted(lines)
