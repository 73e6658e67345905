"""Warnings about copies of rows, and about features that determine the target.

Each client reports only whether its own rows have such a pattern, and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import exp, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyrofl.data.tables.columns import Column, Rows
from pyrofl.data.tables.wording import listed
from pyrofl.nouns import nouns

MIN_ROWS = 10  # rows from which a pattern is hardly chance
NUM_SCREENED_ROWS = 20  # rows that rule out most relations
MIN_MONOTONE_ROWS = 50  # numbers for a monotone relation of two columns
# Part of the variance that a linear function may leave, as of rounded numbers.
LINEAR_TOLERANCE = 1e-8
MIN_EXPECTED_UNIQUE = 5.0  # number of unique rows expected if equal rows were due to chance
MAX_COPIED_FRACTION = 0.2  # fraction of the test rows, or of rows that repeat a pair of values
MAX_UNIQUE_FRACTION = 0.05  # fraction of rows that occur once, where all others are copies
MAX_DEVIATIONS = 20.0  # standard deviations beyond which a number is an outlier
MAX_SHIFT = 4.0  # standard deviations beyond which no column lies as a whole
MIN_DISTINCT = 3  # different numbers, more than a rare code has
MAX_CHANCE_FRACTION = 0.05  # fraction of the pairs of equal rows
MIN_EQUAL_FRACTION = 0.98  # fraction of the rows with equal values in all columns but one
MAX_CHANCE_ACROSS = 0.01  # fraction of the pairs of equal rows of two clients, by chance
MIN_PAIRS_WITHIN = 5.0  # pairs of equal rows within clients that are expected by chance

Cells = NDArray[Any]  # of a column: numbers, or words of type object


class Relation(NamedTuple):
    """Relation of two columns of one client; without rows if one of them is constant."""

    rows: int
    distinct: int  # pairs of values
    is_one_to_one: bool
    is_linear: bool  # or both are equal words
    is_monotone: bool


def share_of_largest(parts: NDArray[np.float64], count: int) -> float:
    """Return the share of the `count` largest of parts [N] in their sum; 0 if all are 0."""
    total = float(parts.sum())
    return float(np.sort(parts)[::-1][: max(count, 0)].sum() / total) if total else 0.0


def relation_of(one: Cells, other: Cells) -> Relation:
    """Return the relation of two columns [N] without missing values."""
    for some in (NUM_SCREENED_ROWS, len(one)):  # few rows rule out most columns
        pairs = set(zip(one[:some].tolist(), other[:some].tolist(), strict=True))
        values, others = (set(column[:some].tolist()) for column in (one, other))
        if not len(values) == len(pairs) == len(others):
            return Relation(len(one), len(pairs), False, False, False)
    if len(pairs) < 2:
        return Relation(0, 0, True, True, True)
    if one.dtype == object or other.dtype == object:
        same = [str(v) for v in one] == [str(v) for v in other]
        return Relation(len(one), len(pairs), True, same, False)
    x, y = ((v - v.mean()) / np.abs(v - v.mean()).max() for v in (one, other))
    left = y @ y - (x @ y) ** 2 / (x @ x)
    is_linear = len(pairs) < 3 or bool(left <= LINEAR_TOLERANCE * (y @ y))
    steps = np.diff(other[one.argsort(kind="stable")])
    steps = steps[steps != 0]
    is_monotone = bool((steps > 0).all() or (steps < 0).all())
    return Relation(len(one), len(pairs), True, is_linear, is_monotone)


def is_determined(relations: Sequence[Relation]) -> bool:
    """Return whether one column determines the other at all clients, beyond chance."""
    if not all(one.is_one_to_one for one in relations):
        return False
    rows = sum(one.rows for one in relations)
    if rows - sum(one.distinct for one in relations) >= max(MIN_ROWS, MAX_COPIED_FRACTION * rows):
        return True
    long = sum(one.rows for one in relations if one.distinct > 2)
    if long >= MIN_ROWS and all(one.is_linear for one in relations):
        return True
    return long >= MIN_MONOTONE_ROWS and all(one.is_monotone for one in relations)


def determined_target_warning(target: str, features: Sequence[str]) -> str:
    """Return a warning about features that determine the target one to one; "" of none."""
    if not features:
        return ""
    return (
        f"column {listed(features, 3)} determines the target {target}: each value of it goes "
        "with one value of the target, and the reverse; expected features that are known before "
        "the target is: leave it out"
    )


def cells_of(column: Column) -> Cells:
    """Return the numbers of a column [N], or its words if some are no numbers."""
    return column.words if np.isnan(column.numbers).any() else column.numbers


def copied_test_warning(rows: Sequence[bytes], is_test: Rows) -> str:
    """Return a warning about a table in which nearly all rows are duplicated, or "".

    If N rows with D distinct values were equal by chance, about N exp(-N / D) would occur once;
    copies of all rows leave none. Rows [N] include features, target and client.
    """
    counts = Counter(rows)
    once = sum(count == 1 for count in counts.values())
    expected = len(rows) * exp(-len(rows) / max(1, len(counts)))
    if expected < MIN_EXPECTED_UNIQUE or once > expected / MIN_EXPECTED_UNIQUE**2:
        return ""
    trained = {row for row, test in zip(rows, is_test, strict=True) if not test}
    same = sum(row in trained for row, test in zip(rows, is_test, strict=True) if test)
    total = int(is_test.sum())
    if same <= MAX_COPIED_FRACTION * total:
        return ""
    return (
        f"{same} of {total} test rows equal a training row in all columns, the target included, as "
        "nearly all rows occur twice or more, so that test scores are too good; expected each row "
        "once: remove the copies"
    )


def is_doubled(columns: Sequence[Cells]) -> bool:
    """Return whether nearly all rows of a client have copies that chance does not explain.

    By chance, two rows are equal with the product of the probabilities that two different rows
    have equal values of a column, without columns that another determines, as wards their beds.
    """
    codes = np.stack([np.unique(column, return_inverse=True)[1] for column in columns], 1)
    rows, counts = np.unique(codes, axis=0, return_counts=True)
    total = len(codes)
    if total < MIN_ROWS or (counts == 1).sum() > MAX_UNIQUE_FRACTION * total:
        return False
    return _pairs(total) * _equal_by_chance(rows) < MAX_CHANCE_FRACTION * _pairs(counts)


def _pairs(counts: Any) -> float:
    """Return the number of pairs within groups of the given sizes."""
    return float((np.asarray(counts, float) * (np.asarray(counts) - 1.0) / 2).sum())


def _equal_by_chance(rows: Cells) -> float:
    """Return the probability that two of these different rows [N, C] of codes were equal."""
    pairs = _pairs(len(rows))
    return prod((_pairs(np.bincount(c)) + 1) / (pairs + 1) for c in _undetermined(rows))


def _undetermined(rows: Cells) -> list[Cells]:
    """Return the columns of different rows [N, C] that no other of few values determines."""
    independent: list[Cells] = []
    for column in sorted(rows.T, key=lambda codes: -int(codes.max())):
        repeats = [len(rows) - int(other.max()) - 1 for other in independent]
        least = min(MIN_ROWS, len(rows) / 2)
        few = [other for other, again in zip(independent, repeats, strict=True) if again >= least]
        size = int(column.max()) + 1
        pairs = [len(np.unique(other * size + column)) for other in few]
        if not any(count == int(other.max()) + 1 for count, other in zip(pairs, few, strict=True)):
            independent.append(column)
    return independent


def doubled_row_warning(clients: Mapping[str, bool]) -> str:
    """Return a warning about clients whose rows are copies of each other, or ""."""
    names = [name for name, is_copied in clients.items() if is_copied]
    if not names:
        return ""
    return (
        f"nearly all rows of {listed(names, 3)} occur twice or more with equal values in all "
        "columns; expected each row once: remove the copies"
    )


def equal_table_warning(clients: Mapping[str, Sequence[Cells]]) -> str:
    """Return a warning about two clients with the same table, or ""; they send its digest."""
    seen: dict[str, str] = {}
    for name, columns in clients.items():
        if not columns or len(columns[0]) < MIN_ROWS:
            continue
        digest = sha256(b"".join(column.tobytes() for column in columns)).hexdigest()
        if (other := seen.setdefault(digest, name)) != name:
            return f"{other} and {name} hold the same rows; expected other rows at each client"
    return ""


def shared_row_warning(clients: Mapping[str, Sequence[Cells]]) -> str:
    """Return a warning about rows that several clients have, beyond chance, or "".

    Chance is that of `is_doubled`; rows that are equal by chance are so within clients, too.

    Args:
        clients: name -> the same columns, of which one may be an identifier of rows.
    """
    names = [name for name, columns in clients.items() if columns and len(columns[0])]
    if len(names) < 2:
        return ""
    sizes = [len(clients[name][0]) for name in names]
    columns = zip(*(clients[name] for name in names), strict=True)
    coded = [np.unique(np.concatenate(parts), return_inverse=True)[1] for parts in columns]
    rows, which = np.unique(np.stack(coded, 1), axis=0, return_inverse=True)
    row_and_client = np.stack([which.ravel(), np.repeat(np.arange(len(names)), sizes)], 1)
    row_and_client, counts = np.unique(
        row_and_client, axis=0, return_counts=True
    )  # different rows of each client
    if len(row_and_client) - len(rows) < MIN_ROWS:
        return ""
    next_is_equal = row_and_client[1:, 0] == row_and_client[:-1, 0]
    neighbors = Counter(
        zip(
            row_and_client[:-1][next_is_equal, 1], row_and_client[1:][next_is_equal, 1], strict=True
        )
    )
    pair = max(neighbors, key=neighbors.__getitem__)
    one, other = (names[client] for client in pair)
    for part, where in (
        (np.isin(row_and_client[:, 1], pair), f"{one} and {other}"),
        (slice(None), f"several {nouns().client.many}, such as {one} and {other},"),
    ):
        if shared := _copies_across(rows, row_and_client[part], counts[part]):
            return (
                f"{shared} rows of {where} are equal in all columns; expected each row at one "
                "client: remove the copies"
            )
    return ""


def _copies_across(rows: Cells, row_and_client: Cells, counts: Cells) -> int:
    """Return the number of rows that several clients have; 0 if chance or a design explains it.

    Args:
        rows: codes of different rows [D, C].
        row_and_client: row and client of each client's different rows [N, 2].
        counts: number of copies of each of them at its client [N].
    """
    shared = int((np.unique(row_and_client[:, 0], return_counts=True)[1] > 1).sum())
    sizes = np.bincount(row_and_client[:, 1])
    across, equal = _pairs(len(row_and_client)) - _pairs(sizes), _equal_across(row_and_client)
    if shared < MIN_ROWS or across * _equal_by_chance(rows) >= MAX_CHANCE_ACROSS * equal:
        return 0
    within = _pairs(np.bincount(row_and_client[:, 1], counts)) * equal / across
    if within < MIN_PAIRS_WITHIN or _pairs(counts) > within / MIN_ROWS:
        return 0
    for place in range(rows.shape[1]):  # such as the responses of a design that clients share
        rest = np.delete(rows, place, 1)
        first, which = np.unique(rest, axis=0, return_index=True, return_inverse=True)[1:]
        num_equal = _equal_across(
            np.stack([which.ravel()[row_and_client[:, 0]], row_and_client[:, 1]], 1)
        )
        by_chance = across * _equal_by_chance(rest[first])
        if by_chance > num_equal / 2:
            continue
        share = np.bincount(rows[row_and_client[:, 0], place]) / len(row_and_client)
        is_design = num_equal >= MIN_EQUAL_FRACTION * sizes[sizes > 0].min()
        if equal < MIN_EQUAL_FRACTION * (num_equal - by_chance) or (
            is_design and (share @ share) ** num_equal > MAX_CHANCE_FRACTION
        ):
            return 0
    return shared


def _equal_across(row_and_client: Cells) -> float:
    """Return the number of pairs of equal rows of two clients; own [N, 2] is row and client."""
    return _pairs(np.bincount(row_and_client[:, 0])) - _pairs(
        np.unique(row_and_client, axis=0, return_counts=True)[1]
    )


def outlier_position(off: NDArray[Any]) -> tuple[int, int] | None:
    """Return row and column of a number that is too far from all training rows, or None.

    It is more than 20 standard deviations from its mean, or that of a column whose numbers, at
    least three different ones, are all more than 4 on one side, as in another unit.

    Args:
        off: distances from the means in training, in standard deviations [N, columns].

    >>> outlier_position(np.array([[0.0], [21.0], [1.0]]))
    (1, 0)
    >>> outlier_position(np.array([[4.5], [4.6], [4.7]]))
    (2, 0)
    """
    far = np.abs(off)
    if far.max() > MAX_DEVIATIONS:
        row, column = divmod(int(far.argmax()), off.shape[1])
        return row, column
    shift = np.maximum(off.min(0), -off.max(0))  # of the nearest number, if all are on one side
    column = int(shift.argmax())
    if shift[column] <= MAX_SHIFT or len(np.unique(off[:, column])) < MIN_DISTINCT:
        return None
    return int(far[:, column].argmax()), column


def frame_copy_warnings(frames: Mapping[str, Any]) -> list[str]:
    """Return warnings of rows that are copies within or between clients' data frames."""
    cells = {name: _cells(frame) for name, frame in frames.items()}
    doubled = doubled_row_warning({name: is_doubled(columns) for name, columns in cells.items()})
    return [
        *filter(None, (doubled, equal_table_warning(cells) or shared_row_warning(_common(frames))))
    ]


def _common(frames: Mapping[str, Any]) -> dict[str, list[Cells]]:
    """Return the columns that all data frames have, in one order."""
    first, *others = frames.values()
    names = [n for n in first.columns if all(n in frame.columns for frame in others)]
    return {name: _cells(frame[names]) for name, frame in frames.items()}


def _cells(frame: Any) -> list[Cells]:
    """Return the columns of a data frame as numbers, or as texts."""
    cells: list[Cells] = []
    for name in frame.columns:
        if frame[name].dtype.kind in "bif":
            cells.append(np.nan_to_num(frame[name].to_numpy(float, na_value=np.nan), nan=np.inf))
        else:
            cells.append(np.array(frame[name].astype(str).tolist()))
    return cells
