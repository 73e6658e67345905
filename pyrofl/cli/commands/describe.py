"""The command `pyrofl describe`: Table 1 by client and of all rows, from sums and counts."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyrofl.cli.commands.check import format_options, stop
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.cross_tables import describe_cross_table
from pyrofl.data.tables.description import (
    Description,
    clients_without_moments,
    describe_tables,
    table_rows,
)
from pyrofl.data.tables.dictionary import ColumnEntry, with_levels
from pyrofl.data.tables.file_checks import (
    column_problems,
    left_out_columns,
    match_columns,
    read_tables,
    usual_columns,
)
from pyrofl.data.tables.owners import ALL_CLIENTS
from pyrofl.data.tables.table_files import files_of_each
from pyrofl.data.tables.wording import listed, number_of
from pyrofl.experiments.console import show
from pyrofl.files import text_tables
from pyrofl.flower.project import Project
from pyrofl.inference.transport.site_rules import SiteRules


def describe(args: Namespace) -> None:
    """Print counts, means, standard deviations, quartiles and levels of columns."""
    rules, files = SiteRules.read(args.rules), files_of_each(args.paths)
    project = Project.read(args.study) if args.study else None
    client = args.client_column or (project.client_column if project else "")
    columns = tuple(args.columns.split(",")) if args.columns else ()
    if project and not columns:
        columns = tuple(n for n in project.used_columns if n not in (client, project.client_name))
    tables, formats, problems = read_tables(files, client, **format_options(args))
    needed, entries = columns or usual_columns(tables, problems), project.columns if project else {}
    pair = tuple(args.cross.split(",")) if args.cross else ()
    if pair and len(set(pair)) != 2:
        raise ValueError(f"--cross is {args.cross!r}; expected two columns, such as sex,arm")
    needed = tuple(dict.fromkeys((*needed, *pair)))
    spellings = list(problems)
    used = match_columns(tables, needed, entries, spellings)
    notes = [one for one in spellings if one.cure == f"rename it {one.column}"]
    if refused := [one for one in spellings if one not in notes]:
        stop(refused, number_of(len(files), "file"))
    lines = [f"{one.file}: {one.column} {one.text}" for one in notes]
    lines += [] if columns else left_out_columns(tables, used)
    used, other_words = _spelled(used, entries)
    lines += other_words + _questioned(used, needed, entries)
    lines += [f"{Path(path).name}: {form}" for path, form in formats.items() if not form.is_usual]
    named = used if client else _by_stem(used)
    described, names = describe_tables(named, needed, rules), [*named]
    if len(pair) == 2:
        without = [
            c for c, copies in described.near_copies.items() if not copies.keys().isdisjoint(pair)
        ]
        cells = describe_cross_table(named, pair, rules, without)
        described = replace(described, entries=(*described.entries, *cells))
    printed = text_tables.table(
        ("column", "statistic", *names, ALL_CLIENTS), table_rows(described.entries, names)
    )
    show("\n".join([printed, *_legend(described, names, rules), *lines]))


def _by_stem(tables: Mapping[str, dict[str, Column]]) -> dict[str, dict[str, Column]]:
    """Return tables by the clients that files are named after.

    Raises:
        ValueError: if two files are named after one client.
    """
    counts = Counter(Path(file).stem for file in tables)
    if twice := [file for file in tables if counts[Path(file).stem] > 1]:
        raise ValueError(
            f"{listed(twice)} are both of client {Path(twice[0]).stem}; expected other names"
        )
    return {Path(file).stem: table for file, table in tables.items()}


def _legend(described: Description, names: Sequence[str], rules: SiteRules) -> list[str]:
    """Return what the marks of a description mean, and what it suppresses."""
    lacking = clients_without_moments(described.entries, names)
    return [
        f"- is a number of fewer than {rules.min_level_rows} rows, or would reveal one, or has an "
        "error above one sd; numbers with \u00b1 are within this error; do not publish "
        "descriptions of tables that differ in a few rows: differences reveal them",
        *(f"{name}: all is without {listed(some)}" for name, some in lacking.items()),
        *(
            f"{client}: {later} is suppressed, as it equals {earlier}, or a linear function of it, "
            f"in all but fewer than {rules.min_level_rows} rows"
            for client, copies in described.near_copies.items()
            for later, earlier in copies.items()
        ),
    ]


def _questioned(
    tables: Mapping[str, Mapping[str, Column]],
    columns: Sequence[str],
    dictionary: Mapping[str, ColumnEntry],
) -> list[str]:
    """Return a line for each column of which a check lists problems, without its cells."""
    lines = list[str]()
    for name in columns:
        parts = {file: table[name] for file, table in tables.items()}
        if problems := [*column_problems(name, parts, dictionary.get(name))]:
            files = listed([*dict.fromkeys(one.file for one in problems)])
            counted = number_of(len(problems), "problem")
            lines.append(f"{name}: pyrofl check lists {counted} in {files}")
    return lines


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
