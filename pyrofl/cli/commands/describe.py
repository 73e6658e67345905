"""The command `pyrofl describe`: Table 1 by client and of all rows, from sums and counts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pyrofl.data.tables.columns import Column, tables_by_client
from pyrofl.data.tables.description import (
    ALL_CLIENTS,
    clients_without_moments,
    describe_tables,
    table_rows,
)
from pyrofl.data.tables.file_checks import usual_columns
from pyrofl.data.tables.table_files import files_of, read_file
from pyrofl.data.tables.wording import listed
from pyrofl.experiments.console import show
from pyrofl.files import text_tables


def describe(args: Namespace) -> None:
    """Print counts, means, standard deviations, quartiles and levels of columns."""
    tables: dict[str, dict[str, Column]] = {}
    for file in files_of(args.path):
        table = read_file(file)
        by_client = {Path(file).stem: table}
        if args.client_column:
            by_client = tables_by_client(table, args.client_column, tables)
        tables |= by_client
    columns = tuple(args.columns.split(",")) if args.columns else usual_columns(tables)
    for name in columns:
        if lacking := [client for client, table in tables.items() if name not in table]:
            raise ValueError(
                f"column {name} is missing in {listed(lacking)}; expected columns of all files: "
                "see pyrofl check"
            )
    entries = describe_tables(tables, columns, args.min_count)
    head = ("column", "statistic", *tables, ALL_CLIENTS)
    legend = (
        f"- is a number of fewer than {args.min_count} rows, or would reveal one; a quantile is "
        "within its error"
    )
    suppressed = clients_without_moments(entries, [*tables])
    notes = [f"{name}: all is without {listed(some)}" for name, some in suppressed.items()]
    printed = text_tables.table(head, table_rows(entries, [*tables]))
    show("\n".join([printed, legend, *notes]))
