"""Warnings about inconsistent spellings or units, and suspicious cells, in tables.

Differences between clients are found from their column summaries.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pyrofl.data.tables.column_summary import ColumnSummary, Numbers
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.units import unit_warning
from pyrofl.data.tables.wording import listed
from pyrofl.nouns import nouns

NEGATIVE = (-9999, -999, -888, -99, -88, -9, -1)
CODES = (*NEGATIVE, 77, 88, 99, 777, 888, 999, 7777, 8888, 9999, 99999)
"""Numbers that often stand for missing values."""
CODES_OF_FEW = (*CODES, 9)  # of a column with few different values
ROW_NUMBER = re.compile(r"(?i)(^|[_ ])(id|index|idx|row|nr|unnamed: \d+)$")
FORMS = {
    "numbers": re.compile(r"[+-]?(?!0\d)\d+([.,]\d+)?([eE][+-]?\d+)?"),
    "dates": re.compile(r"\d{4}([-/.])\d\d?\1\d\d?\b.*|\d\d?([-/.])\d\d?\2\d{2,4}\b.*"),
}
"""Kind of measurement -> form of its cells."""
TOTALS = frozenset(("total", "totals", "sum", "all", "mean", "average", "gesamt", "summe"))
SAME_WORDS = {
    "sex": ("f female w weiblich frau femme woman", "m male männlich mann homme man"),
    "truth": ("y yes ja j oui o si", "n no nein non"),
}
"""Concept -> spellings of each of its categories."""
OTHER_WORDS = frozenset(["d", "divers", "diverse", "x", "other", "unknown", "unbekannt", "u"])
MAX_CODE_VALUES = 10  # largest number of different values that may be meaningful codes
# Rows with a code, from which they may be more than the rows with numbers near it.
MIN_CODE_ROWS = 4
CODE_RANGE_SHARE = 0.1  # part of the range of the other numbers, at the end near a code
MIN_CELL_FRACTION = 0.9  # fraction of a column's variance that a single cell explains
MIN_VALUES = 10  # values from which a pattern is hardly chance


def key_of(word: str) -> str:
    """Return a normalized key, equal for words that differ only in case, width, dashes or blanks.

    >>> key_of("New  York") == key_of("new york"), key_of("St-L\u00f4") == key_of("ST\u2013L\u00d4")
    (True, True)
    """
    letters = unicodedata.normalize("NFKC", word)
    kinds = ((unicodedata.category(letter), letter) for letter in letters)
    plain = ("-" if kind == "Pd" else letter for kind, letter in kinds if kind != "Cf")
    return " ".join("".join(plain).casefold().replace("\u2019", "'").split())


def spellings(words: Iterable[str]) -> list[list[str]]:
    """Group words with the same meaning: spelling variants, or initials such as "Y" for "yes"."""
    groups: dict[str, list[str]] = {}
    for word in dict.fromkeys(words):
        groups.setdefault(key_of(word), []).append(word)
    short = {key for key in groups if len(key) == 1}
    long = {key[0]: key for key in groups if len(key) > 1}
    if len(short) > 1 and short == set(long) and len(groups) == 2 * len(short):
        return [groups[key] + groups[long[key]] for key in sorted(short)]  # as of Y, N, yes and no
    for concept in SAME_WORDS.values():
        every = [text.split() for text in concept]
        if set(groups) <= OTHER_WORDS.union(*every):
            alike = [[w for key in keys for w in groups.pop(key, ())] for keys in every]
            return [group for group in (*alike, *groups.values()) if len(group) > 1]
    return [group for group in groups.values() if len(group) > 1]


def word_warning(column: str, words: Iterable[str], kind: str) -> str:
    """Return a warning about words in a column that differ only in case or blanks, or ""."""
    groups = [" and ".join(map(repr, group)) for group in spellings(words)]
    if not groups:
        return ""
    return (
        f"column {column} holds {listed(groups, 3)}, which look like spellings of one word and "
        f"count as different {kind}; expected one spelling: correct the column"
    )


def level_warning(
    column: str, told: Mapping[str, ColumnSummary], *, are_common: bool = True
) -> str:
    """Return a warning about inconsistent spellings of categories between clients, or "".

    It covers spellings of one word and, if categories are those of all clients, a client without a
    common category.
    """
    owners: dict[str, list[str]] = {}
    for client, sums in told.items():
        for word in sums.levels or ():
            owners.setdefault(word, []).append(client)
    groups = [
        " and ".join(f"{word!r} (in {listed(owners[word], 3)})" for word in group)
        for group in spellings(owners)
    ]
    if not groups:
        return distinct_level_warning(column, told) if are_common else ""
    return (
        f"column {column} holds {listed(groups, 3)}, which look like spellings of one word and "
        "count as different categories; expected one spelling in all "
        f"{nouns().client.many}: correct the column"
    )


def distinct_level_warning(column: str, told: Mapping[str, ColumnSummary]) -> str:
    """Return a warning about a client that shares no category with the other clients, or ""."""
    for client, sums in told.items():
        others = {w for name, one in told.items() if name != client for w in one.levels or ()}
        own = set(sums.levels or ())
        if len(own) > 1 and others and sums.count >= MIN_VALUES and not own & others:
            return (
                f"column {column} holds {listed(sorted(own), 3)} in {client} and "
                f"{listed(sorted(others), 3)} elsewhere, without a common word, as if {client} had "
                f"a code of its own; expected one code in all {nouns().client.many}"
            )
    return ""


def number_warning(column: Column) -> str:
    """Return a warning about suspicious numbers, such as codes for missing values, or "".

    They are codes for missing values, see `of_codes`; row numbers and dates written as numbers; and
    a single number that explains nearly all the variance of the column.
    """
    values = column.numbers[~np.isnan(column.numbers)]
    distinct = np.unique(values)
    if text := code_warning(column.name, [values]):
        return text
    if len(distinct) <= MAX_CODE_VALUES:
        return ""
    message = f"column {column.name} holds"
    if ROW_NUMBER.search(column.name) and len(distinct) == len(values):
        return (
            f"{message} a different number in every row, as row numbers do, and is used as one; "
            "expected measurements: leave it out (--features)"
        )
    if all(18000101 <= value <= 21001231 and _is_date(value) for value in distinct[:100]):
        return (
            f"{message} numbers such as {distinct[0]:.0f}, which look like dates and count as "
            "plain numbers; expected days since a date"
        )
    if (lone := lone_cell(values)) is not None:
        at = np.flatnonzero(~np.isnan(column.numbers))[lone]
        return lone_cell_warning(column.name, column.words[at], column.places[at], values)
    return ""


def lone_cell(values: Numbers) -> int | None:
    """Return the position of the number that explains nearly all the variance, or None."""
    if len(values) < MIN_VALUES or len(np.unique(values)) <= MAX_CODE_VALUES:
        return None
    squares = (values - values.mean()) ** 2
    is_lone = squares.max() > MIN_CELL_FRACTION * squares.sum()
    return int(squares.argmax()) if is_lone else None


def lone_cell_warning(column: str, cell: object, place: str, values: Numbers) -> str:
    """Return a warning about the number that explains nearly all the variance of a column."""
    return (
        f"column {column} holds {cell} in {place}, from which nearly all its variance comes (the "
        f"median is {np.median(values):g}); correct the cell if it is an error"
    )


def code_warning(column: str, clients: Sequence[Numbers]) -> str:
    """Return a warning about a number that seems to be a code for missing values, or "".

    Such a code, as -999 or 99, occurs in several rows and lies far from the other numbers, or is
    their largest or smallest and more frequent than all numbers near it. The warning follows from
    counts, extremes and the first different values of each client's numbers.

    Args:
        column: name of the column.
        clients: numbers of each client, without missing ones.
    """
    if (seen := code_of(clients)) is None:
        return ""
    return (
        f"column {column} holds {seen.code} in {seen.rows} rows, and otherwise {seen.low:g} to "
        f"{seen.high:g}; if it stands for a missing value, expected an empty cell"
    )


class MissingCode(NamedTuple):
    """Number that seems to be a code for missing values, the range of others, and whether far."""

    code: int
    rows: int
    low: float
    high: float
    is_far: bool  # whether it lies far from all other numbers


def code_of(clients: Sequence[Numbers]) -> MissingCode | None:
    """Return the code for missing values among the clients' numbers, see `code_warning`."""
    parts = [values for values in clients if len(values)]
    if not any(np.isin(values, CODES_OF_FEW).any() for values in parts):
        return None
    codes: Sequence[int] = CODES
    rests = [values[~np.isin(values, CODES)] for values in parts]
    if is_few := len(_first_values(rests)) <= MAX_CODE_VALUES:
        codes, rests = CODES_OF_FEW, [values[~np.isin(values, CODES_OF_FEW)] for values in parts]
    rests = [rest for rest in rests if len(rest)]
    if len(_first_values(rests)) < 2:
        return None
    low, high = min(rest.min() for rest in rests), max(rest.max() for rest in rests)
    for code in codes:
        count = sum(np.count_nonzero(values == code) for values in parts)
        outside = max(low - code, code - high)
        if count < 2 or outside <= 0:
            continue
        width = outside + CODE_RANGE_SHARE * (high - low)
        near = sum(np.count_nonzero(np.abs(rest - code) <= width) for rest in rests)
        is_far = outside > (2 * max(high - low, 1) if is_few else (high - low) / 2)
        is_negative = code < 0 <= low and (code < -1 or low > 0)
        is_heap = count >= MIN_CODE_ROWS and near < count
        if is_far or (not is_few and (is_negative or is_heap)):
            return MissingCode(code, int(count), low, high, bool(is_far))
    return None


def _first_values(clients: Sequence[Numbers]) -> set[float]:
    """Return the different values of all clients, at most eleven of each."""
    return {
        value for values in clients for value in np.unique(values)[: MAX_CODE_VALUES + 1].tolist()
    }


def measurement_warning(column: str, words: Sequence[str]) -> str:
    """Return a warning about many categories that are numbers or dates written as text, or "".

    >>> measurement_warning("age", [f"{k},5" for k in range(20)])[:58]
    "column age holds text that reads as numbers, such as '0,5'"
    """
    if len(words) <= MAX_CODE_VALUES:
        return ""
    kind = next((k for k, form in FORMS.items() if all(map(form.fullmatch, words))), "")
    if not kind:
        return ""
    cure = "days since a date" if kind == "dates" else "numbers, with a full stop before decimals"
    return (
        f"column {column} holds text that reads as {kind}, such as {words[0]!r}, and counts as "
        f"{len(words)} categories; expected {cure}, or C({column}) if these are categories"
    )


def _is_date(value: float) -> bool:
    return value == round(value) and 1 <= value // 100 % 100 <= 12 and 1 <= value % 100 <= 31


def total_row_warning(column: Column) -> str:
    """Return a warning about a single row labeled as a total, such as "all", or ""."""
    words = column.words.tolist()
    odd = [w for w in dict.fromkeys(words) if key_of(w) in TOTALS and words.count(w) == 1]
    if not odd:
        return ""
    return (
        f"column {column.name} holds {odd[0]!r} in a single row, which counts as a group of its "
        "own; if the row sums up others, leave it out"
    )


def spelling_and_unit_warnings(
    clients: Sequence[Mapping[str, ColumnSummary]], names: Sequence[str]
) -> list[str]:
    """Return warnings about inconsistent spellings and units between clients' columns."""
    texts = []
    for column in clients[0]:
        sums_by_client = {name: sums[column] for name, sums in zip(names, clients, strict=True)}
        texts += [level_warning(column, sums_by_client), unit_warning(column, sums_by_client)]
    return [text for text in texts if text]
