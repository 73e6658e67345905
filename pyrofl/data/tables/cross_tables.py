"""Cross tables of two columns by client and of all rows, from counts that reveal no row.

Totals of rows and columns may be known, as `description` reports the counts of levels. A cell with
fewer than `min_level_rows` rows is suppressed, and others with it, until no such cell follows from
the totals and the cells that are shown (Hundepool et al., Statistical Disclosure Control, Wiley
2012, section 4.4). Cells without rows are shown. A table that cannot be protected so is suppressed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.description import Entry, Limits, with_total

Cell = tuple[str, str]

MISSING = "missing"  # level of missing values

MAX_SMALL_CELLS = 40  # for each of which two linear programs are solved
MIN_RANGE = 0.5  # of a small cell: whole numbers in a shorter range are known


def describe_cross_table(
    tables: Mapping[str, Mapping[str, Column]], pair: tuple[str, str], limits: Limits
) -> tuple[Entry, ...]:
    """Return the counts of pairs of levels by client and of all rows.

    Args:
        tables: client -> its columns.
        pair: the two columns, which all clients have.
        limits: rules of the clients' site.
    """
    first, second = pair
    shown = {
        client: cross_counts(table[first], table[second], limits)
        for client, table in tables.items()
    }
    levels = [{cell[axis] for counts in shown.values() for cell in counts or ()} for axis in (0, 1)]
    entries: list[Entry] = []
    for cell in product(sorted(levels[0]), sorted(levels[1])):
        counts = {c: None if own is None else own.get(cell, 0) for c, own in shown.items()}
        entries += with_total(" and ".join(pair), ", ".join(cell), counts)
    return tuple(entries)


def cross_counts(first: Column, second: Column, limits: Limits) -> dict[Cell, int | None] | None:
    """Return the counts of a client's pairs of levels; None is suppressed, as may be the table.

    Missing values are a level, so that totals are the counts that a description shows.
    """
    words = (np.where(column.gaps, MISSING, column.words).tolist() for column in (first, second))
    counts = Counter(zip(*words, strict=True))
    levels = [{cell[axis] for cell in counts} for axis in (0, 1)]
    longest = max((len(level) for some in levels for level in some), default=0)
    if (
        sum(counts.values()) < limits.min_rows
        or max(map(len, levels)) > limits.max_levels
        or longest > limits.max_level_characters
    ):
        return None
    hidden = hidden_cells(counts, limits.min_level_rows)
    if hidden is None:
        return None
    return {cell: None if cell in hidden else n for cell, n in counts.items()}


def hidden_cells(counts: Mapping[Cell, int], fewest: int) -> set[Cell] | None:
    """Return the cells to suppress, or None if no choice protects those below `fewest` rows.

    Args:
        counts: cell -> its number of rows, at least 1.
        fewest: smallest number of rows of a cell that may be known.
    """
    small = {cell for cell, count in counts.items() if count < fewest}
    if len(small) > MAX_SMALL_CELLS:
        return None
    hidden = set(small)
    while known := next(_known_cells(counts, small, hidden), None):
        others = [
            cell
            for cell in counts
            if cell not in hidden and (cell[0] == known[0] or cell[1] == known[1])
        ] or [cell for cell in counts if cell not in hidden]
        if not others:
            return None
        hidden.add(min(others, key=lambda cell: (counts[cell], cell)))
    return hidden


def _known_cells(counts: Mapping[Cell, int], small: set[Cell], hidden: set[Cell]) -> Iterator[Cell]:
    """Yield small cells whose count follows from the totals of rows and columns."""
    from scipy.optimize import linprog

    places = sorted(hidden)
    lines = sorted({(axis, cell[axis]) for cell in places for axis in (0, 1)})
    member = np.array([[cell[axis] == level for cell in places] for axis, level in lines])
    numbers = np.array([counts[cell] for cell in places], dtype=np.float64)
    for at, cell in enumerate(places):
        if cell not in small:
            continue
        goal = np.eye(len(places))[at]
        limits = {"A_eq": member.astype(float), "b_eq": member @ numbers, "bounds": (1, None)}
        low, high = (sign * linprog(sign * goal, **limits).fun for sign in (1, -1))
        if high - low < MIN_RANGE:
            yield cell
