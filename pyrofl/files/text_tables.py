"""Tables of text, for the terminal and in Markdown: numbers are right-aligned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

BEST = " *"  # after the best number of a column
EMPTY_CELLS = ("", "-", "None")
UNITS_AND_CONNECTIVES = {"to", "of", "and", "e", "sd", "sds"}
UNITS_AND_CONNECTIVES |= {"s", "ms", "min", "h", "kB", "MB", "GB", "bytes"}


def looks_numeric(value: Any) -> bool:
    """Return whether a cell is a number, perhaps with an error, an interval, a unit or a mark.

    >>> cells = (3, "0.93 ± 0.02 *", "**-1.5** (-3 to 0.2)", "5 rows", "lr=0.1")
    >>> [looks_numeric(v) for v in cells]
    [True, True, True, False, False]
    """
    if not isinstance(value, str):
        return isinstance(value, int | float)
    words = re.findall(r"[^\W\d_]+", value)
    return bool(re.match(r"[*~<>≤≥+\-±( ]*\.?\d", value)) and UNITS_AND_CONNECTIVES.issuperset(
        words
    )


def is_mostly_numeric(values: Iterable[Any]) -> bool:
    """Return whether most cells of a column are numbers; empty cells do not count."""
    is_numeric = [looks_numeric(v) for v in values if v is not None and v not in EMPTY_CELLS]
    return sum(is_numeric) > len(is_numeric) / 2


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""Format a table for the terminal: text left-aligned, numbers right-aligned, None as a dash.

    >>> print(table(("method", "accuracy"), [("fedavg", 0.9), ("local", 0.85)]))
    method  accuracy
    fedavg    0.9000
    local     0.8500
    >>> print(table(("level", "n"), [("a\nb", 3)]))
    level  n
    a b    3
    """
    laid = []
    for title, *values in zip(columns, *rows, strict=True):
        cells = [_in_a_line(title), *map(_cell, values)]
        flush = ">" if not values or is_mostly_numeric(values) else "<"
        if flush == ">" and any(cell.endswith(BEST) for cell in cells):
            cells = [cell if cell.endswith(BEST) else cell + " " * len(BEST) for cell in cells]
        laid.append([f"{cell:{flush}{max(map(len, cells))}}" for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*laid, strict=True))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table, with columns of numbers right-aligned.

    >>> print(markdown(("method", "accuracy"), [("fedavg", "90.1 ± 0.2"), ("local", "")]))
    | method | accuracy |
    |---|---:|
    | fedavg | 90.1 ± 0.2 |
    | local |  |
    """
    lines = [[str(cell) for cell in row] for row in rows]
    each = zip(*lines, strict=True) if lines else [()] * len(columns)
    rule = "".join("|---:" if is_mostly_numeric(values) else "|---" for values in each)
    head, *body = (f"| {' | '.join(line)} |" for line in (columns, *lines))
    return "\n".join([head, f"{rule}|", *body])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return format_number(value) if isinstance(value, float) else _in_a_line(str(value))


def _in_a_line(text: str) -> str:
    """Return a text with blanks for line breaks and control characters, as cells of files have."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def format_number(value: float) -> str:
    """Format a number with four decimals, or four significant digits if it is tiny.

    >>> format_number(0.9), format_number(0.0), format_number(1.5e-7)
    ('0.9000', '0.0000', '1.500e-07')
    """
    return f"{value:.3e}" if 0 < abs(value) < 0.00005 else f"{value:.4f}"
