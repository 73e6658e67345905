"""Warnings about clients whose numbers have another unit, from the clients' column summaries.

Another unit multiplies all numbers by one factor. This moves the mean of the logarithms of their
absolute values and leaves the standard deviation of the logarithms, also of skewed numbers with
zeros. Clients are divided into two groups by the means of their logarithms. The distance of the
groups is compared with its standard error and with the distances of clients within the groups; for
few clients these are assumed to be 0.4 standard deviations within clients.

`tests/data/test_units.py` has the rates of warnings in simulated federations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import exp, log, sqrt
from operator import add

import numpy as np

from pyrofl.data.tables.column_summary import ColumnMoments, ColumnSummary
from pyrofl.data.tables.wording import listed
from pyrofl.nouns import nouns

ROUNDING = 1e-9  # SD of logarithms up to which numbers count as equal
MIN_NUMBERS = 3  # numbers of each group of clients
MIN_RATIO = 1.7  # ratio of two units
MIN_SIGNED_RATIO = 8.0  # the same, of numbers that may be negative, such as deviations from 0
CLEAR = 4.5  # standard errors between the groups
USUAL = 0.4  # SD of clients' means of logarithms, in standard deviations within clients
LEAST_USUAL = 0.09  # smallest such SD
# SD within clients of columns that may be one number of each client, as its beds.
MAX_WITHIN_SD = 0.03
UNITS = (2.2046, 2.54, 7, 10, 12, 18.016, 24, 28.35, 38.67, 60, 88.42, 100, 1000)
"""Ratios of pairs of units, of which one is expected of tight columns."""
UNIT_TOLERANCE = 0.04  # relative difference from it
PRIOR_CLIENTS = 4  # clients that the assumed SD counts as
SAME_SPREAD, MAX_SPREAD = 0.25, 0.75  # difference of log SDs: of log ratios, and at most
SLACK, SLACK_WHOLE = 0.5, -0.5  # standard errors that are added to it; of whole numbers, as counts
MIN_DEGREES = 9  # numbers of each group of clients, besides one of each client
FAHRENHEIT = (1.8, 32.0)  # of degrees Celsius
MIN_SCALE_DISTANCE = 4.0  # standard deviations of degrees Celsius between the means of both scales
MAX_SD_DIFFERENCE = 0.1  # difference of log SDs of degrees, besides one standard error

Groups = tuple[list[str], list[str]]  # clients with small and with large numbers


def unit_warning(column: str, told: Mapping[str, ColumnSummary]) -> str:
    """Return a warning about clients whose numbers seem to be in another unit, or "".

    The factor between the units is at least 1.7, or they are degrees Fahrenheit and Celsius.
    """
    sums_by_client = {
        client: sums for client, sums in told.items() if sums.levels is None and sums.count
    }
    groups = _divide(
        {client: sums.logs for client, sums in sums_by_client.items() if sums.logs.count}
    )
    factor = _factor(sums_by_client, groups)
    if not factor:  # of degrees, which differ by a sum too
        groups = _divide({client: sums.plain for client, sums in sums_by_client.items()})
        factor = _of_fahrenheit(sums_by_client, groups)
    if not factor:
        return ""
    low, high = groups
    how, odd, others = "larger", high, low
    if len(low) < len(high):
        how, odd, others = "smaller", low, high
    mean, usual = (
        reduce(add, (sums_by_client[c].plain for c in part)).mean for part in (odd, others)
    )
    return (
        f"column {column}: the numbers in {listed(odd, 3)} are about {factor:.3g} times {how} "
        f"than those in {listed(others, 3)} (means {mean:.4g} and {usual:.4g}), as if they had "
        f"another unit; expected one unit in all {nouns().client.many}: convert the column"
    )


def _divide(means: Mapping[str, ColumnMoments]) -> Groups:
    """Return the clients with small and with large means, farthest apart.

    The sum of squares between the groups is maximal; a client counts as at most ten numbers.
    """
    clients = sorted(means, key=lambda client: means[client].mean)
    if len(clients) < 2:
        return clients, []
    weights = np.array([1 / (1 / means[client].count + 0.1) for client in clients])
    sums = np.cumsum(weights * [means[client].mean for client in clients])
    below = np.cumsum(weights)
    above = below[-1] - below[:-1]
    distance = (sums[-1] - sums[:-1]) / above - sums[:-1] / below[:-1]
    cut = int((distance**2 * below[:-1] * above).argmax()) + 1
    return clients[:cut], clients[cut:]


def _factor(known: Mapping[str, ColumnSummary], groups: Groups) -> float:
    """Return the factor between the units of two groups; 0 if units seem equal."""
    low, high = ([known[client].logs for client in group] for group in groups)
    if min(sum(one.count for one in part) - len(part) for part in (low, high)) < MIN_NUMBERS - 1:
        return 0.0
    ratio = reduce(add, high).mean - reduce(add, low).mean
    columns = [known[client] for group in groups for client in group]
    smallest = MIN_SIGNED_RATIO if any(c.has_negative for c in columns) else MIN_RATIO
    is_whole = not any(c.has_fractions for c in columns)
    if ratio < log(smallest) or not _have_one_spread(low, high, ratio, is_whole):
        return 0.0
    is_tight = max(_within(low)[0], _within(high)[0]) < MAX_WITHIN_SD**2
    if is_tight and not any(abs(ratio - log(unit)) < UNIT_TOLERANCE for unit in UNITS):
        return 0.0
    return exp(ratio) if ratio > CLEAR * _standard_error(low, high) else 0.0


def _have_one_spread(
    low: Sequence[ColumnMoments], high: Sequence[ColumnMoments], ratio: float, is_whole: bool
) -> bool:
    """Return whether the logarithms of both groups vary as much, as in two units of one quantity.

    If the groups differ by a sum, or are counts, those of the larger numbers vary less.
    """
    (of_low, dof_low), (of_high, dof_high) = _within(low), _within(high)
    if min(of_low, of_high) <= ROUNDING**2:
        return False
    error = sqrt(0.5 / dof_low + 0.5 / dof_high)
    slack = SAME_SPREAD * ratio + (SLACK_WHOLE if is_whole else SLACK) * error
    return abs(log(of_high / of_low)) / 2 <= min(slack, MAX_SPREAD)


def _standard_error(low: Sequence[ColumnMoments], high: Sequence[ColumnMoments]) -> float:
    """Return the standard error of the distance of two clients of different groups."""
    (of_low, dof_low), (of_high, dof_high) = _within(low), _within(high)
    squares = (of_low * dof_low + of_high * dof_high) / (dof_low + dof_high)
    usual = max(USUAL * sqrt(squares), LEAST_USUAL)
    between = sum(_between(part, squares) for part in (low, high))
    clients = len(low) + len(high) - 2
    varies = (PRIOR_CLIENTS * usual**2 + between) / (PRIOR_CLIENTS + clients)
    sampled = sum(squares / sum(one.count for one in part) for part in (low, high))
    return sqrt(sampled + 2 * varies)


def _within(part: Sequence[ColumnMoments]) -> tuple[float, int]:
    """Return the variance within clients, and its degrees of freedom."""
    dof = sum(one.count for one in part) - len(part)
    return sum(one.squares for one in part) / dof, dof


def _between(part: Sequence[ColumnMoments], within: float) -> float:
    """Return the sum of squares between clients, without that of the numbers within them."""
    mean = reduce(add, part).mean
    return sum(max((one.mean - mean) ** 2 - within / one.count, 0.0) for one in part)


def _of_fahrenheit(known: Mapping[str, ColumnSummary], groups: Groups) -> float:
    """Return the ratio of degrees Fahrenheit of one group and Celsius of the other; 0 if not."""
    low, high = ([known[client].plain for client in group] for group in groups)
    if min(sum(one.count for one in part) - len(part) for part in (low, high)) < MIN_DEGREES:
        return 0.0
    (celsius, dof_low), (fahrenheit, dof_high) = _within(low), _within(high)
    mean, warm = reduce(add, low).mean, reduce(add, high).mean
    slope, offset = FAHRENHEIT
    if (
        min(celsius, fahrenheit) <= 0
        or mean <= 0
        or warm - mean <= MIN_SCALE_DISTANCE * sqrt(celsius)
    ):
        return 0.0
    slack = MAX_SD_DIFFERENCE + sqrt(0.5 / dof_low + 0.5 / dof_high)
    has_mean = abs(warm - (slope * mean + offset)) < sqrt(fahrenheit)
    has_spread = abs(log(sqrt(fahrenheit / celsius) / slope)) <= slack
    return warm / mean if has_mean and has_spread else 0.0
