"""Description of the clients' tables by sums and counts: Table 1 by client and of all rows.

A client reports counts, means and sums of squares; then, for quantiles, how many of its numbers are
at most some bounds of a common grid, with at least `min_level_rows` rows between two bounds and
beyond the last; and counts of levels. The limits are those of a site's rules:

- A column with fewer than `min_rows` values at a client has neither moments nor levels there.
- Counts of levels below `min_level_rows` are suppressed, and the next smallest if they would follow
  from the total. So are levels of more than `max_levels`, or with longer names than
  `max_level_characters`, as of identifiers and notes.
- Moments are suppressed that are nearly those of a few rows: of an event of fewer than
  `min_level_rows` rows, of numbers that are equal but for fewer than `min_rows`, or of which fewer
  than `min_level_rows` have more than `max_share` of the squared deviations. "all" is then that of
  the other clients.
- From 1 to `min_level_rows` - 1 missing values are suppressed as a rare level is. The number of
  values is then within an error, as the number of rows follows from other columns.
- A column that determines another one but for fewer than `min_level_rows` rows, such as its copy in
  another unit, has neither moments nor levels: differences of sums would be those of these rows.

Differences of sums can still reveal rows: of two descriptions of tables that differ in a few rows,
of more than two columns, such as a total and its parts, and of means of whole numbers, from which
the number of values may follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from math import ceil, floor, inf, log10, sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pyrofl.data.tables.column_summary import ColumnMoments
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.near_copies import near_copies
from pyrofl.data.tables.owners import ALL_CLIENTS, name_problem
from pyrofl.data.tables.row_checks import share_of_largest

RARE_LEVELS = "rare levels"
QUANTILES = {"25 %": 0.25, "median": 0.5, "75 %": 0.75}
BOUNDS_PER_SD, GRID_SDS = 20, 6  # of the grid: bounds in a standard deviation, and its half-width

Numbers = NDArray[np.float64]
BoundCounts = tuple[tuple[int, int], ...]
"""Places of bounds in the grid, and numbers of values up to them, in order."""


class Limits(Protocol):
    """Limits of a description, as `SiteRules` has them."""

    @property
    def min_rows(self) -> int: ...  # noqa: D102
    @property
    def min_level_rows(self) -> int: ...  # noqa: D102
    @property
    def max_share(self) -> float: ...  # noqa: D102
    @property
    def max_levels(self) -> int: ...  # noqa: D102
    @property
    def max_level_characters(self) -> int: ...  # noqa: D102


class Entry(NamedTuple):
    """Number of a description; None is suppressed, and `error` is the largest possible error."""

    column: str
    statistic: str
    client: str
    value: float | None
    error: float = 0.0


@dataclass(frozen=True)
class Description:
    """Numbers of a description, and the columns that it suppresses as near copies.

    Attributes:
        entries: the numbers, by column, statistic and client.
        near_copies: client -> column without moments and levels -> the column that it nearly
            equals, see `near_copies`.
    """

    entries: tuple[Entry, ...]
    near_copies: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class NumbersReport:
    """What a client reports on a column of numbers; moments are None if they reveal a row."""

    missing: int | None  # None for a few values, or a few missing ones
    count: int | None  # None for a few
    count_error: int
    moments: ColumnMoments | None


@dataclass(frozen=True)
class LevelsReport:
    """What a client reports on categories: counts of levels that are not suppressed."""

    missing: int | None
    counts: Mapping[str, int]
    rare: bool  # whether some levels are suppressed


def describe_tables(
    tables: Mapping[str, Mapping[str, Column]], columns: Sequence[str], limits: Limits
) -> Description:
    """Return the description of columns by client and of all rows, from the clients' reports.

    Args:
        tables: client -> its columns.
        columns: columns to describe, which all clients have.
        limits: rules of the clients' site.

    Raises:
        ValueError: if a column of numbers has a cell that is none, or a client has a name that
            none may have, such as "all".
    """
    if text := next(filter(None, map(name_problem, tables)), ""):
        raise ValueError(f"{text}; expected another name")
    entries: list[Entry] = []
    used = {client: {name: table[name] for name in columns} for client, table in tables.items()}
    copies = {client: near_copies(table, limits.min_level_rows) for client, table in used.items()}
    for name in columns:
        parts = {client: table[name] for client, table in used.items()}
        hidden = {client for client, originals in copies.items() if name in originals}
        numeric = [column.is_numeric for column in parts.values() if not column.gaps.all()]
        if numeric and all(numeric):
            for client, column in parts.items():
                if column.odd.any():
                    raise ValueError(
                        f"{client}: {column.first(column.odd)}, where other cells are numbers; "
                        "expected numbers of at most 3.4e+38: correct it, see pyrofl check"
                    )
            entries += _of_numbers(name, parts, limits, hidden)
        else:
            reports = {c: levels_report(one, limits, c in hidden) for c, one in parts.items()}
            entries += _of_levels(name, reports)
    return Description(tuple(entries), {client: some for client, some in copies.items() if some})


def numbers_report(column: Column, limits: Limits, is_hidden: bool = False) -> NumbersReport:
    """Return a client's report on a column of numbers, without moments if it is hidden."""
    values, total = column.numbers[~np.isnan(column.numbers)], len(column.words)
    missing, fewest = total - len(values), limits.min_level_rows
    if 0 < len(values) < limits.min_rows:
        return NumbersReport(None, None, 0, None)
    is_safe = len(values) and not is_hidden and not is_dominated(values, limits)
    moments = ColumnMoments.of(values) if is_safe else None
    if not is_few(missing, fewest):
        return NumbersReport(missing, len(values), 0, moments)
    return NumbersReport(None, total - fewest // 2, max(1, (fewest - 1) // 2), moments)


def is_few(missing: int, fewest: int) -> bool:
    """Return whether a number of missing values is suppressed: from 1 to `fewest` - 1.

    If that is 1 alone, 0 is suppressed, too.
    """
    return int(fewest > 2) <= missing < fewest and fewest > 1


def is_dominated(values: Numbers, limits: Limits) -> bool:
    """Return whether mean and standard deviation of a column reveal some of its rows.

    They do if a few rows differ from all others, which are equal: whole numbers of up to four rows
    often follow from their sum and sum of squares, and one of two values from its count. They
    nearly do if one or two rows have nearly all squared deviations: as many as there are moments.
    """
    _, counts = np.unique(values, return_counts=True)
    others = len(values) - int(counts.max())
    fewest = limits.min_level_rows if len(counts) == 2 else limits.min_rows
    parts = (values - np.median(values)) ** 2
    few = min(limits.min_level_rows - 1, 2)
    return 0 < others < fewest or share_of_largest(parts, few) > limits.max_share


def clients_without_moments(
    entries: Sequence[Entry], clients: Sequence[str]
) -> dict[str, list[str]]:
    """Return column -> the clients with suppressed moments, which "all" leaves out."""
    empty = {(one.column, one.client) for one in entries if one.statistic == "n" and one.value == 0}
    suppressed: dict[str, list[str]] = {}
    for one in entries:
        is_mean = one.statistic == "mean" and one.client in clients
        if is_mean and one.value is None and (one.column, one.client) not in empty:
            suppressed.setdefault(one.column, []).append(one.client)
    return suppressed


def bound_counts(values: Numbers, grid: Numbers, min_count: int) -> BoundCounts:
    """Return how many values are at most some bounds, between which are at least `min_count`.

    The last bound has at least as many above it, or is the end of the grid: the first bound above
    all values would nearly be the largest one.
    """
    counts = np.searchsorted(np.sort(values), grid, side="right")
    result, last = list[tuple[int, int]](), 0
    for place, count in enumerate(counts.tolist()):
        is_end = place == len(grid) - 1 and count == len(values)
        if count - last >= min_count and (len(values) - count >= min_count or is_end):
            result.append((place, count))
            last = count
    return tuple(result)


def levels_report(column: Column, limits: Limits, is_hidden: bool = False) -> LevelsReport:
    """Return a client's report on a column of categories, without counts if it is hidden."""
    counts, gaps = Counter(column.words[~column.gaps].tolist()), int(column.gaps.sum())
    total, fewest = sum(counts.values()), limits.min_level_rows
    missing = None if is_few(gaps, fewest) else gaps
    if 0 < total < limits.min_rows or len(counts) > limits.max_levels or is_hidden:
        return LevelsReport(missing if total >= limits.min_rows else None, {}, True)
    rare = {
        level
        for level, count in counts.items()
        if count < fewest or len(level) > limits.max_level_characters
    }
    left = sorted(counts.keys() - rare, key=lambda level: (counts[level], level))
    suppressed = [counts[level] for level in rare] + ([gaps] if missing is None else [])
    if left and _follow_from_total(suppressed, fewest):
        rare.add(left[0])
    shown = {level: count for level, count in counts.items() if level not in rare}
    return LevelsReport(missing, shown, bool(rare))


def _follow_from_total(hidden: Sequence[int], fewest: int) -> bool:
    """Return whether hidden counts, all below `fewest`, follow from their sum, or are too few."""
    smallest, largest = len(hidden), len(hidden) * (fewest - 1)
    return bool(hidden) and (sum(hidden) < fewest or sum(hidden) in (smallest, largest))


def _of_numbers(
    name: str, parts: Mapping[str, Column], limits: Limits, hidden: Collection[str]
) -> list[Entry]:
    """Return the description of a column of numbers, by two exchanges with the clients.

    It has no moments of the clients that are hidden.
    """
    reports = {c: numbers_report(column, limits, c in hidden) for c, column in parts.items()}
    moments = {c: one.moments for c, one in reports.items() if one.moments is not None}
    pooled = sum(moments.values(), ColumnMoments())
    every = {**moments, ALL_CLIENTS: pooled} if moments else {}
    entries = with_total(name, "missing", {c: one.missing for c, one in reports.items()})
    for client in [*reports, ALL_CLIENTS]:
        own = every.get(client)
        sd = None if own is None or own.count < 2 else _sd(own)
        counted = [reports[one] for one in ([client] if client in reports else moments)]
        numbers = [one.count for one in counted if one.count is not None]
        count = sum(numbers) if len(numbers) == len(counted) else None
        entries.append(Entry(name, "n", client, count, sum(one.count_error for one in counted)))
        entries.append(Entry(name, "mean", client, None if own is None else own.mean))
        entries.append(Entry(name, "sd", client, sd))
    if not moments:
        return entries
    grid = _grid(pooled)
    counts = {}
    for client in moments:
        values = parts[client].numbers
        counts[client] = bound_counts(values[~np.isnan(values)], grid, limits.min_level_rows)
    for statistic, part in QUANTILES.items():
        for client in reports:
            own_counts = {client: counts[client]} if client in counts else {}
            entries.append(_quantile(name, statistic, part, client, own_counts, every, grid))
        entries.append(_quantile(name, statistic, part, ALL_CLIENTS, counts, every, grid))
    return entries


def _sd(moments: ColumnMoments) -> float:
    """Return the standard deviation; 0 of one number."""
    return sqrt(moments.squares / max(moments.count - 1, 1))


def _grid(moments: ColumnMoments) -> Numbers:
    """Return the bounds of a common grid, by the mean and sd of all rows."""
    step = _sd(moments) / BOUNDS_PER_SD
    half = GRID_SDS * BOUNDS_PER_SD
    return np.array([moments.mean + place * step for place in range(-half, half + 1)])


def _quantile(
    name: str,
    statistic: str,
    part: float,
    client: str,
    counts: Mapping[str, BoundCounts],
    moments: Mapping[str, ColumnMoments],
    grid: Numbers,
) -> Entry:
    """Return the middle of the interval that holds a quantile, and its half-width.

    The interval holds both numbers between which a quantile lies by any usual definition, such as
    "linear" and "inverted_cdf" of NumPy. The value of rank k, from 0, is above a bound if at most k
    values can be at most the bound, and at most the bound if at least k + 1 values are. If it is
    wider than two standard deviations, the quantile is None.
    """
    if client in moments and not moments[client].squares:
        return Entry(name, statistic, client, moments[client].mean)
    total = sum(moments[one].count for one in counts)
    low, high = np.zeros(len(grid)), np.zeros(len(grid))
    for one, pairs in counts.items():
        at = np.array([place for place, _ in pairs], dtype=int)
        up_to = np.array([0, *(count for _, count in pairs), moments[one].count])
        low += up_to[np.searchsorted(at, np.arange(len(grid)), side="right")]
        high += up_to[1:][np.searchsorted(at, np.arange(len(grid)), side="left")]
    rank = part * (total - 1)
    above = np.flatnonzero(high <= floor(rank))
    below = np.flatnonzero(low >= ceil(rank) + 1)
    if not total or not len(above) or not len(below):
        return Entry(name, statistic, client, None, inf)
    ends = grid[above[-1]], grid[below[0]]
    if ends[1] - ends[0] > 2 * _sd(moments[client]):
        return Entry(name, statistic, client, None, inf)
    return Entry(name, statistic, client, float(sum(ends) / 2), float(ends[1] - ends[0]) / 2)


def _of_levels(name: str, reports: Mapping[str, LevelsReport]) -> list[Entry]:
    """Return the description of a column of categories."""
    entries = with_total(name, "missing", {c: one.missing for c, one in reports.items()})
    levels = sorted({level for one in reports.values() for level in one.counts})
    for level in levels:
        counts: dict[str, float | None] = {
            client: None if one.rare and level not in one.counts else one.counts.get(level, 0)
            for client, one in reports.items()
        }
        entries += with_total(name, level, counts)
    if any(one.rare for one in reports.values()):
        rest = {c: None if one.rare else 0.0 for c, one in reports.items()}
        entries += with_total(name, RARE_LEVELS, rest)
    return entries


def with_total(name: str, level: str, counts: Mapping[str, float | None]) -> list[Entry]:
    """Return the counts of a level by client and their sum, which is None if one is suppressed."""
    values = [count for count in counts.values() if count is not None]
    total = sum(values) if len(values) == len(counts) else None
    return [Entry(name, level, c, n) for c, n in [*counts.items(), (ALL_CLIENTS, total)]]


def table_rows(entries: Sequence[Entry], clients: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return a row for each column and statistic, with a cell for each client and for all."""
    cells = {(one.column, one.statistic, one.client): one for one in entries}
    pairs = dict.fromkeys((one.column, one.statistic) for one in entries)
    return [
        (*pair, *(_cell(cells.get((*pair, client))) for client in (*clients, ALL_CLIENTS)))
        for pair in pairs
    ]


def _cell(entry: Entry | None) -> str:
    """Return a number, with its possible error, or a dash if it is suppressed."""
    if entry is None or entry.value is None:
        return "-"
    number = f"{entry.value}" if isinstance(entry.value, int) else f"{entry.value:.4g}"
    return _with_error(entry.value, entry.error) if entry.error else number


def _with_error(value: float, error: float) -> str:
    """Return a number with its largest possible error, which includes the rounding of both.

    >>> _with_error(34.94, 2.06), _with_error(1234567.0, 12.0), _with_error(78, 1)
    ('34.94 ± 2.1', '1234567 ± 12', '78 ± 1')
    """
    size = floor(log10(abs(value))) if value else 0
    digits = max(4, size - floor(log10(error)) + 2)
    number = f"{value:.{digits}g}"
    largest = Context(prec=2, rounding=ROUND_CEILING).create_decimal(
        error + abs(float(number) - value)
    )
    return f"{number} ± {float(largest):.2g}"
