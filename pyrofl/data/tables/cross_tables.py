"""Cross tables of two columns by client and of all rows, from counts that reveal no row.

Totals of rows and columns may be known, as `description` reports the counts of levels. A cell with
fewer than `min_level_rows` rows is suppressed, and others with it, until no such cell follows from
the totals and the cells that are shown (Hundepool et al., Statistical Disclosure Control, Wiley
2012, section 4.4). Cells without rows are shown. A table that cannot be protected so is suppressed.
This holds for one table: several cross tables of the same rows can reveal more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import product

import numpy as np

from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.description import (
    RARE_LEVELS,
    Entry,
    Limits,
    levels_report,
    with_total,
)

Cell = tuple[str, str]

MISSING = "missing"  # level of missing values

MAX_SMALL_CELLS = 40  # for each of which two linear programs are solved
MIN_RANGE = 0.5  # of a small cell: whole numbers in a shorter range are known


def describe_cross_table(
    tables: Mapping[str, Mapping[str, Column]],
    pair: tuple[str, str],
    limits: Limits,
    without: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Return the counts of pairs of levels by client and of all rows.

    Args:
        tables: client -> its columns.
        pair: the two columns, which all clients have.
        limits: rules of the clients' site.
        without: clients whose table is suppressed, as a description suppresses one of the columns.
    """
    first, second = pair
    shown = {
        client: None if client in without else cross_counts(table[first], table[second], limits)
        for client, table in tables.items()
    }
    levels = [{cell[axis] for counts in shown.values() for cell in counts or ()} for axis in (0, 1)]
    entries: list[Entry] = []
    for cell in product(sorted(levels[0]), sorted(levels[1])):
        counts = {client: _count_of(cell, own) for client, own in shown.items()}
        entries += with_total(" and ".join(pair), ", ".join(cell), counts)
    return tuple(entries)


def _count_of(cell: Cell, counts: Mapping[Cell, int | None] | None) -> int | None:
    """Return a client's count of a cell; None if it is suppressed, or its level is a rare one."""
    if counts is None or cell in counts:
        return None if counts is None else counts[cell]
    for axis in (0, 1):
        levels = {one[axis] for one in counts}
        if cell[axis] not in levels and RARE_LEVELS in levels:
            return None
    return 0


def cross_counts(first: Column, second: Column, limits: Limits) -> dict[Cell, int | None] | None:
    """Return the counts of a client's pairs of levels; None is suppressed, as may be the table."""
    levels = (_levels_shown(column, limits) for column in (first, second))
    counts = Counter(zip(*levels, strict=True))
    hidden = hidden_cells(counts, limits.min_level_rows)
    if hidden is None:
        return None
    return {cell: None if cell in hidden else n for cell, n in counts.items()}


def _levels_shown(column: Column, limits: Limits) -> list[str]:
    """Return the level of each row as a description shows it, so that totals are those shown there.

    Missing values are a level, and all that a description suppresses are one.
    """
    report = levels_report(column, limits)
    gap = RARE_LEVELS if report.missing is None else MISSING
    return [
        gap if is_gap else word if word in report.counts else RARE_LEVELS
        for word, is_gap in zip(column.words.tolist(), column.gaps.tolist(), strict=True)
    ]


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
    while exposed := next(_exposed_cells(counts, small, hidden), None):
        shown = [cell for cell in counts if cell not in hidden]
        others = [c for c in shown if c[0] == exposed[0] or c[1] == exposed[1]] or shown
        if not others:
            return None
        hidden.add(min(others, key=lambda cell: (counts[cell], cell)))
    return hidden


def _exposed_cells(
    counts: Mapping[Cell, int], small: set[Cell], hidden: set[Cell]
) -> Iterator[Cell]:
    """Yield small cells with only one count that agrees with the totals of rows and columns."""
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
