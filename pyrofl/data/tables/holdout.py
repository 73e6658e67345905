"""Which rows of a table are for testing: a share of each site, the last ones, or as told."""

from __future__ import annotations

import re
from datetime import datetime

import numpy as np
import torch
from torch import Tensor

from pyrofl.data.tables.columns import Column, Ints

DATE = re.compile(  # day, hour, the rest of the time of day, time zone
    r"(\d{4}-\d\d-\d\d)(?:[T ]+(\d\d?)(:\d\d(?::\d\d(?:\.\d+)?)?) ?(Z|[-+]\d\d:?\d\d)?)?"
)
TEST = {"test": True, "true": True, "1": True, "train": False, "false": False, "0": False}


def draw_test_rows(codes: Ints, rng: np.random.Generator, share: float = 0.2) -> Tensor:
    """Mark a share of the rows of each group [N] (rounded, never all) for testing: bool [N]."""
    is_test = np.zeros(len(codes), dtype=np.bool_)
    for code in np.unique(codes):
        rows = rng.permutation(np.flatnonzero(codes == code))
        is_test[rows[: _count(len(rows), share)]] = True
    return torch.from_numpy(is_test)


def last_rows(codes: Ints, time: Column, share: float = 0.2) -> Tensor:
    """Mark the last share of the rows of each group [N], by a column of time: bool [N].

    Rows of one time are taken in the order of the file.

    Raises:
        ValueError: if the column holds neither numbers nor dates such as 2026-01-31, or some dates
            have a time zone and others none.
    """
    order = _in_time(time)
    is_test = np.zeros(len(codes), dtype=np.bool_)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        rows = rows[np.argsort(order[rows], kind="stable")]
        is_test[rows[len(rows) - _count(len(rows), share) :]] = True
    return torch.from_numpy(is_test)


def told_rows(column: Column) -> Tensor:
    """Read which rows are for testing from a column of 1 and 0, or test and train: bool [N].

    Raises:
        ValueError: if it holds anything else.
    """
    words = [word.lower().removesuffix(".0") for word in column.words]
    for word, place in zip(words, column.places, strict=True):
        if word not in TEST:
            raise ValueError(
                f"{column.file}: column {column.name} holds {word!r} in {place}; expected test or "
                "train, 1 or 0"
            )
    return torch.tensor([TEST[word] for word in words])


def _count(rows: int, share: float) -> int:
    return min(round(share * rows), rows - 1)


def _in_time(time: Column) -> Ints:
    """Return the place in time of every row [N]."""
    if time.is_numeric:
        time.refuse_odd("take another column of time")
        return np.unique(time.numbers, return_inverse=True)[1]
    found = list[datetime]()
    for word, place in zip(time.words, time.places, strict=True):
        told = f"{time.file}: column {time.name} holds {word!r} in {place}"
        if (read := _date(word)) is None:
            raise ValueError(
                f"{told}; expected numbers, or dates such as 2026-01-31 or 2026-01-31 09:05"
            )
        if found and (read.tzinfo is None) != (found[0].tzinfo is None):
            raise ValueError(f"{told}; expected a time zone in all rows, or in none")
        found.append(read)
    place_of = {moment: place for place, moment in enumerate(sorted(set(found)))}
    return np.array([place_of[moment] for moment in found])


def _date(word: str) -> datetime | None:
    """Read a date, or a date and a time of day of which the hour may have one digit."""
    if (parts := DATE.fullmatch(word)) is None:
        return None
    day, hour, rest, zone = parts.groups("")
    # `fromisoformat` takes up to six digits of a second; nanoseconds are rounded down.
    rest = re.sub(r"(\.\d{6})\d+", r"\1", rest)
    clock = f"T{int(hour):02}{rest}{zone}" if hour else ""
    try:
        return datetime.fromisoformat(day + clock)
    except ValueError:  # such as 2026-02-30
        return None
