"""Clients that the rows of a table name in the column that identifies the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pyrofl.data.tables.columns import Column, number
from pyrofl.data.tables.table_files import columns_of
from pyrofl.data.tables.wording import listed
from pyrofl.user_warnings import warn_user

ALL_CLIENTS = "all"  # of the column of all rows in printed tables


def name_problem(name: str) -> str:
    """Return why no client may have a name, or "".

    >>> name_problem("bern"), name_problem("q,r")
    ('', "a client is called 'q,r', and commas separate names")
    """
    reasons = {
        ", like the column of all rows": name == ALL_CLIENTS,
        ", and options start with a dash": name.startswith("-"),
        ", and commas separate names": "," in name,
    }
    why = next((text for text, holds in reasons.items() if holds), "")
    return f"a client is called {name!r}{why}" if why else ""


def named_clients(table: Any, column: str, names: Sequence[str], client: str | None) -> list[str]:
    """Return the client that each row of a table names, or [] if the table lacks the column.

    Arguments and errors are those of `owners_of`.
    """
    cells = client_cells(table, column)
    return [] if cells is None else owners_of(cells, names, client)


def client_cells(table: Any, column: str) -> Column | None:
    """Return the column of a table that identifies the client, or None if it has none."""
    if isinstance(table, str | Path):
        return columns_of(table).get(column)
    if hasattr(table, "columns") and hasattr(table, "iloc"):
        names = [name for name in table.columns if str(name) == column]
        return columns_of(table[names])[column] if names and len(table) else None
    if isinstance(table, Mapping) and column in table:
        return columns_of({column: table[column]})[column]
    return None


def owners_of(cells: Column, names: Sequence[str], client: str | None) -> list[str]:
    """Return the client that each row names; names that are not among `names` are new clients.

    Args:
        cells: column that identifies the client.
        names: names of the known clients.
        client: client that is requested for all rows, or None.

    Raises:
        ValueError: if a cell is empty, names another client than `client`, or differs from a known
            name by upper and lower case alone.

    Warns:
        UserWarning: if rows name known clients and new ones.
    """
    if cells.gaps.any():
        raise ValueError(f"{cells.first(cells.gaps)}; expected the name of a client in every row")
    words = dict.fromkeys(cells.words.tolist())
    spelled = {word: _known_spelling(word, names) for word in words}
    owners = [spelled[word] for word in cells.words.tolist()]
    odd = np.array([client not in (None, name) for name in owners])
    if odd.any():
        raise ValueError(
            f"{cells.first(odd)}, and client is {client!r}; pass client=None to predict every row "
            f"for the client that it names, or leave out column {cells.name}"
        )
    for name in dict.fromkeys(owners):
        near = [one for one in names if one.casefold() == name.casefold()]
        if near and name not in names:
            at = np.array([one == name for one in owners])
            raise ValueError(f"{cells.first(at)}, which is no client; did you mean {near[0]}?")
    new = [name for name in dict.fromkeys(owners) if name not in names]
    if new and set(owners) - set(new):
        warn_user(
            f"{cells.label} names {listed(new)} besides known clients; these rows are predicted "
            "for new clients"
        )
    return owners


def _known_spelling(word: str, names: Sequence[str]) -> str:
    """Return the known name that a cell means: the same text, or a number of the same value."""
    if word in names or np.isnan(number(word)):
        return word
    return next((name for name in names if number(name) == number(word)), word)
