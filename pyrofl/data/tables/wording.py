"""Formatting of lists in messages, Unicode normalization, and a check of file paths."""

from __future__ import annotations

import os
from collections.abc import Sequence

MAX_LISTED_NAMES = 8  # names that are listed before the rest is counted


def listed(words: Sequence[str], most: int = MAX_LISTED_NAMES) -> str:
    """Format a comma-separated list of the first words and the number of remaining words.

    >>> listed("abcd", 3), listed("abc", 3)
    ('a, b, c and 1 more', 'a, b, c')
    """
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> number_of(1, "round"), number_of(1200, "row")
    ('1 round', '1,200 rows')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def refuse_no_file(path: str) -> None:
    """Raise ValueError if a path is a pipe or device, not a regular file."""
    if "\0" in path:
        raise ValueError(f"{path!r} has a NUL in it; expected the path of a file")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is a pipe or a device; expected a file, which can be read twice")


def file_error(path: str | os.PathLike[str], problem: str, expected: str) -> ValueError:
    """Return an error about a file: its problem, and what is expected."""
    return ValueError(f"{path}: {problem}; expected {expected}")
