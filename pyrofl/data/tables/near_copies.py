"""Columns of one table that are copies of each other but for a few rows.

The difference of their sums is that of these rows: of a value and its copy with one gap, mean and
count of both give the value. This is differencing (Hundepool et al., Statistical Disclosure
Control, Wiley 2012, section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pyrofl.data.tables.columns import Column

MAX_RESIDUAL_SDS = 0.05  # of a copy in another unit, which may be rounded
NUM_SCREENED_ROWS = 200  # rows that rule out most pairs of columns

Numbers = NDArray[np.float64]


def near_copies(table: Mapping[str, Column], fewest: int) -> dict[str, str]:
    """Return columns that nearly equal an earlier column: later column -> the earlier one.

    They are linear functions of an earlier one, such as the same numbers in another unit or a flag
    and its opposite, in all rows but 1 to `fewest` - 1. Rows with a gap in one of both are among
    these. Columns are numbers, or two words.
    """
    codes = {
        name: values for name, column in table.items() if (values := _codes(column)) is not None
    }
    result = dict[str, str]()
    for name, values in codes.items():
        for other, earlier in codes.items():
            if other == name:
                break
            if other not in result and 0 < num_other_rows(earlier, values, fewest) < fewest:
                result[name] = other
                break
    return result


def _codes(column: Column) -> Numbers | None:
    """Return the numbers of a column, or 0 and 1 for two words; None of other columns."""
    if column.is_numeric:
        return column.numbers
    words = sorted(set(column.words[~column.gaps].tolist()))
    if len(words) != 2:
        return None
    return np.where(column.gaps, np.nan, column.words == words[1])


def num_other_rows(one: Numbers, other: Numbers, fewest: int) -> int:
    """Return in how many rows a column is no linear function of another; about, from `fewest`.

    Args:
        one: numbers [N], with NaN where they are missing.
        other: the other numbers [N].
        fewest: number of rows from which it does not matter.
    """
    is_gap = np.isnan(one), np.isnan(other)
    num_gaps = int((is_gap[0] != is_gap[1]).sum())
    x, y = (values[~is_gap[0] & ~is_gap[1]] for values in (one, other))
    if num_gaps >= fewest or len(x) < 2 or not np.ptp(x) or not np.ptp(y):
        return fewest  # differences from a constant are those from any number
    largest = MAX_RESIDUAL_SDS * float(y.std())
    for count in (NUM_SCREENED_ROWS, len(x)):
        num_off = _num_off_line(x[:count], y[:count], largest)
        if num_gaps + num_off >= fewest:
            break
    return num_gaps + num_off


def _num_off_line(x: Numbers, y: Numbers, largest: float) -> int:
    """Return how many points are farther than `largest` from a line through most of them.

    Its slope is the median of slopes of pairs half of the points apart, so that a few points do not
    change it.
    """
    order, half = np.argsort(x, kind="stable"), len(x) // 2
    left, right = order[: len(x) - half], order[half:]
    apart = x[right] > x[left]
    if not apart.any():
        return 0
    slope = float(np.median((y[right] - y[left])[apart] / (x[right] - x[left])[apart]))
    rest = y - slope * x
    return int((np.abs(rest - np.median(rest)) > largest).sum())
