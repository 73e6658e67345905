"""Summaries of a client's table columns (counts, moments, categories) that contain no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyrofl.arguments import check_name, checked
from pyrofl.data.tables.columns import Column, number
from pyrofl.data.tables.table_files import columns_of

CONSTANT_TOLERANCE = 1e-12  # relative spread below which all values of a column count as equal
MIN_SQUARABLE = 1e-100  # of which squares are not 0
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ColumnMoments:
    """Count, mean and sum of squared deviations of numbers; moments can be added."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Numbers) -> ColumnMoments:
        """Return the moments of numbers [N]."""
        mean = float(values.mean()) if len(values) else 0.0
        return cls(len(values), mean, float(((values - mean) ** 2).sum()))

    def __add__(self, other: ColumnMoments) -> ColumnMoments:
        """Return the moments of the numbers of both (Chan et al. 1979)."""
        count = self.count + other.count
        if not count:
            return ColumnMoments()
        apart, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * share
        return ColumnMoments(count, self.mean + apart * share, squares)


@dataclass(frozen=True)
class ColumnSummary:
    """Summary of one column of a client's training rows; summaries can be added."""

    count: int = 0  # number of values present
    gaps: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    levels: tuple[str, ...] | None = None  # its categories; None: it holds numbers
    logs: ColumnMoments = ColumnMoments()  # of log |x| of the numbers other than 0
    has_negative: bool = False
    has_fractions: bool = False

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        """Combine two clients' summaries into the summary of all their rows."""
        gaps, count = self.gaps + other.gaps, self.count + other.count
        if self.levels is not None and other.levels is not None:
            levels = (*self.levels, *(w for w in other.levels if w not in self.levels))
            return ColumnSummary(count, gaps, levels=levels)
        both = self.plain + other.plain
        return ColumnSummary(
            count,
            gaps,
            both.mean,
            both.squares,
            logs=self.logs + other.logs,
            has_negative=self.has_negative or other.has_negative,
            has_fractions=self.has_fractions or other.has_fractions,
        )

    @property
    def plain(self) -> ColumnMoments:
        """Moments of the numbers."""
        return ColumnMoments(self.count, self.mean, self.squares)

    @property
    def varies(self) -> bool:
        """Whether the column's numbers differ by more than rounding errors."""
        return self.squares > self.count * (CONSTANT_TOLERANCE * self.mean) ** 2

    @property
    def underflows(self) -> bool:
        """Whether the squares of different numbers are 0 in double precision."""
        return not self.squares and self.logs.squares > 0 and self.logs.mean < log(MIN_SQUARABLE)

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the column; the latter is 1 for a constant column."""
        return self.mean, sqrt(self.squares / self.count) if self.varies else 1.0


@checked
def summarize_columns(
    table: Any, features: Sequence[str], categories: Sequence[str] = ()
) -> dict[str, ColumnSummary]:
    """Return a summary of each column of a client's training rows, without the rows.

    Args:
        table: path of a file, data frame, or dict of columns.
        features: names of the columns, in an order common to all clients.
        categories: names of the categorical columns; the others hold numbers.

    Raises:
        ValueError: if a column is missing, or a numeric column holds something else than numbers.
    """
    columns, summaries = columns_of(table), dict[str, ColumnSummary]()
    for name in (*features, *categories):
        check_name(name, list(columns), "column")
    for name in features:
        column = columns[name]
        if name in categories:
            words = dict.fromkeys(column.words[~column.gaps].tolist())
            summaries[name] = summarize_values(category_codes(column, tuple(words)), tuple(words))
        else:
            column.refuse_odd("name it among categories")
            summaries[name] = summarize_values(column.numbers)
    return summaries


def summarize_values(values: Numbers, levels: Sequence[str] | None = None) -> ColumnSummary:
    """Summarize a column [N] of numbers, or category codes if `levels` are given; NaN: missing."""
    there = values[~np.isnan(values)]
    count, gaps = len(there), len(values) - len(there)
    if levels is not None:
        codes = np.unique(there.astype(np.int64)).tolist()
        return ColumnSummary(count, gaps, levels=tuple(levels[code] for code in codes))
    plain = ColumnMoments.of(there)
    return ColumnSummary(
        count,
        gaps,
        plain.mean,
        plain.squares,
        logs=ColumnMoments.of(np.log(np.abs(there[there != 0]))),
        has_negative=bool((there < 0).any()),
        has_fractions=bool((there != np.round(there)).any()),
    )


def category_codes(column: Column, levels: Sequence[str]) -> Numbers:
    """Return the category code [N] of each cell of a column; -1: unknown category, NaN: missing.

    Numbers match in any spelling, as data frames write 1 as 1.0 in columns with gaps.
    """
    place: dict[str | float, float] = {number(w): float(c) for c, w in enumerate(levels)}
    place = {value: code for value, code in place.items() if value == value}  # but NaN, of texts
    place |= {word: float(code) for code, word in enumerate(levels)}
    of_words = {word: place.get(word, place.get(number(word), -1.0)) for word in set(column.words)}
    codes = np.array([of_words[word] for word in column.words])
    codes[column.gaps] = np.nan
    return codes
