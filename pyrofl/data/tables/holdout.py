"""Selection of test rows: a random fraction of each group, the latest rows, or marked ones."""

from __future__ import annotations

import re
from collections.abc import Callable
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
    """Draw a random fraction of each group's rows as test rows, never all of them: mask [N]."""
    return _first_rows(codes, share, rng.permutation)


def last_rows(codes: Ints, time: Column, share: float = 0.2) -> Tensor:
    """Select the latest fraction of each group's rows as test rows: mask [N].

    The column holds numbers or dates such as 2026-01-31; ties keep the order of the file.
    """
    at = _in_time(time)
    return _first_rows(codes, share, lambda rows: rows[np.argsort(at[rows], kind="stable")][::-1])


def _first_rows(codes: Ints, share: float, ordered: Callable[[Ints], Ints]) -> Tensor:
    """Mark the first fraction of each group's rows, in a given order, as test rows: mask [N]."""
    is_test = np.zeros(len(codes), dtype=np.bool_)
    for code in np.unique(codes):
        rows = ordered(np.flatnonzero(codes == code))
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    return torch.from_numpy(is_test)


def told_rows(column: Column) -> Tensor:
    """Return a mask of test rows [N] from a column with 1 and 0, or with "test" and "train"."""
    words = [word.lower().removesuffix(".0") for word in column.words]
    if (bad := np.array([word not in TEST for word in words])).any():
        raise ValueError(f"{column.first(bad)}; expected test or train, 1 or 0")
    return torch.tensor([TEST[word] for word in words])


def _in_time(time: Column) -> Ints:
    """Return the chronological rank of every row, given a column of times: [N]."""
    if time.is_numeric:
        time.refuse_odd("use another time column")
        return np.unique(time.numbers, return_inverse=True)[1]
    times = list[datetime]()
    for word, place in zip(time.words, time.places, strict=True):
        message = f"{time.label} holds {word!r} in {place}"
        if (read := _date(word)) is None:
            cure = "dates such as 2026-01-31 or 2026-01-31 09:05"
            raise ValueError(f"{message}; expected numbers, or {cure}")
        if times and (read.tzinfo is None) != (times[0].tzinfo is None):
            raise ValueError(f"{message}; expected a time zone in all rows, or in none")
        times.append(read)
    return np.unique(np.array(times), return_inverse=True)[1]


def _date(word: str) -> datetime | None:
    """Parse a date with an optional time of day; None if it is invalid."""
    if (parts := DATE.fullmatch(word)) is None:
        return None
    day, hour, rest, zone = parts.groups("")
    # `fromisoformat` accepts up to six digits of a second; nanoseconds are rounded down.
    rest = re.sub(r"(\.\d{6})\d+", r"\1", rest)
    clock = f"T{int(hour):02}{rest}{zone}" if hour else ""
    try:
        return datetime.fromisoformat(day + clock)
    except ValueError:  # such as 2026-02-30
        return None
