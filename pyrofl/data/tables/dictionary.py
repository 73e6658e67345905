"""Data dictionary of a study: type, unit, range and levels of each column, and their check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any

import numpy as np

from pyrofl.arguments import check_name, composed
from pyrofl.data.tables.columns import Column
from pyrofl.data.tables.data_quality import key_of, spellings
from pyrofl.data.tables.wording import listed, number_of

TYPES = ("number", "integer", "category")
ENTRIES = ("type", "unit", "range", "levels")
HEADER_UNIT = re.compile(r"(.+?)\s*[(\[](.+)[)\]]")  # as "creatinine (mg/dL)"


@dataclass(frozen=True)
class ColumnEntry:
    """Entry of a data dictionary.

    Attributes:
        type: "number", "integer" or "category".
        unit: unit of the numbers; "" is none.
        low: smallest number that is permitted.
        high: largest.
        levels: the only permitted words of a category, the reference first; () permits all.
    """

    type: str
    unit: str = ""
    low: float = -inf
    high: float = inf
    levels: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The permitted numbers in words, with their unit."""
        ends = {(False, True): f"at most {self.high:g}", (True, False): f"at least {self.low:g}"}
        both = f"from {self.low:g} to {self.high:g}"
        text = ends.get((isfinite(self.low), isfinite(self.high)), both)
        return f"{text} {self.unit}".strip()

    @property
    def facts(self) -> dict[str, Any]:
        """The entry as JSON can write it."""
        ends = [end if isfinite(end) else None for end in (self.low, self.high)]
        return {"type": self.type, "unit": self.unit, "range": ends, "levels": [*self.levels]}


def read_dictionary(entries: Any) -> dict[str, ColumnEntry]:
    """Return the entries of a data dictionary: column -> entry.

    Args:
        entries: column -> mapping with some of type, unit, range and levels.

    Raises:
        ValueError: if an entry is unknown, of a wrong type, or contradicts another one.

    >>> read_dictionary({"age": {"unit": "years", "range": [18, None]}})["age"].range
    'at least 18 years'
    """
    if not isinstance(entries, Mapping):
        raise ValueError(f"columns is {entries!r}; expected lines such as `age: {{unit: years}}`")
    return {str(name): _entry(str(name), about) for name, about in entries.items()}


def _entry(name: str, about: Any) -> ColumnEntry:
    """Return the entry of a column."""
    if not isinstance(about, Mapping) or not about:
        raise ValueError(f"column {name} is {about!r}; expected some of {', '.join(ENTRIES)}")
    for entry in about:
        check_name(str(entry), ENTRIES, f"entry of column {name}:")
    levels = _levels(name, about["levels"]) if "levels" in about else ()
    kind = about.get("type", "category" if levels else "number")
    check_name(str(kind), TYPES, f"type of column {name}:")
    if kind == "category":
        if odd := [entry for entry in ("unit", "range") if entry in about]:
            raise ValueError(f"column {name} is a category with {odd[0]}; expected only levels")
        return ColumnEntry(kind, levels=levels)
    if levels:
        raise ValueError(f"column {name} is of type {kind} with levels; expected type category")
    unit = about.get("unit", "")
    if not isinstance(unit, str) or (not unit.strip() and "unit" in about):
        raise ValueError(f"unit of column {name} is {unit!r}; expected a text, such as years")
    return ColumnEntry(str(kind), unit.strip(), *_range(name, about.get("range", (None, None))))


def _levels(name: str, levels: Any) -> tuple[str, ...]:
    """Return the levels of a column; numbers as they are written."""
    words = [str(one).strip() for one in levels] if isinstance(levels, list) else []
    words = [composed(word) for word in words]
    if len(words) < 2 or "" in words or len({*words}) < len(words):
        expected = "two or more different words, such as [f, m]"
        raise ValueError(f"levels of column {name} are {levels!r}; expected {expected}")
    if odd := [word for word in words if "," in word]:
        raise ValueError(f"level {odd[0]!r} of column {name} has a comma; expected none")
    return tuple(words)


def _range(name: str, ends: Any) -> tuple[float, float]:
    """Return the smallest and the largest permitted number of a column."""
    pair = [*ends] if isinstance(ends, list | tuple) else []
    numbers = [one for one in pair if one is not None]
    if (
        len(pair) != 2
        or any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers)
        or not all(map(isfinite, numbers))
        or (len(numbers) == 2 and numbers[0] >= numbers[1])
    ):
        expected = "[LOWEST, HIGHEST], with null for an open end"
        raise ValueError(f"range of column {name} is {ends!r}; expected {expected}")
    return (-inf if pair[0] is None else pair[0], inf if pair[1] is None else pair[1])


def near_header(name: str, headers: Sequence[str], entry: ColumnEntry | None) -> tuple[str, str]:
    """Return a header that names a column with its unit, and its cure; "" if there is none.

    >>> near_header("height", ["age", "Height [m]"], ColumnEntry("number", "cm"))
    ('Height [m]', 'convert it from m to cm, and rename it height')
    """
    for header in headers:
        parts = HEADER_UNIT.fullmatch(header)
        if parts is None or key_of(parts[1]) != key_of(name):
            continue
        if entry and entry.unit and key_of(parts[2]) != key_of(entry.unit):
            return header, f"convert it from {parts[2]} to {entry.unit}, and rename it {name}"
        return header, f"rename it {name}"
    return "", ""


def dictionary_problems(column: Column, entry: ColumnEntry) -> Iterator[tuple[str, str]]:
    """Yield what contradicts the dictionary in a column, each with its cure."""
    if entry.type == "category":
        yield from _other_levels(column, entry.levels) if entry.levels else ()
        return
    numbers = column.numbers
    is_out = (numbers < entry.low) | (numbers > entry.high)
    if is_out.any():
        total = int((~np.isnan(numbers)).sum())
        text = f"has {int(is_out.sum())} of {number_of(total, 'number')} that are not {entry.range}"
        unit = f"write the numbers in {entry.unit}" if entry.unit else "correct the numbers"
        yield f"{text}: {_places(column, is_out)}", f"{unit}; leave cells empty if they are missing"
    is_part = numbers != np.round(numbers)
    if entry.type == "integer" and (odd := is_part & ~np.isnan(numbers)).any():
        yield f"has {_places(column, odd)}", "write whole numbers"


def _places(column: Column, at: np.ndarray) -> str:
    """Return the first cells of a column and their lines."""
    cells = zip(column.words[at], column.places[at], strict=True)
    return listed([f"{word} in {place}" for word, place in cells], 3)


def _other_levels(column: Column, levels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word of a column that is no level."""
    words = column.words[~column.gaps].tolist()
    for word in dict.fromkeys(words):
        if word in levels or _level_of_number(word, levels):
            continue
        level = _meant(word, levels)
        cure = f"write {level!r}" if level else f"write one of {', '.join(levels)}, or leave it out"
        yield f"has {word!r} in {number_of(words.count(word), 'row')}, which is no level", cure


def with_levels(column: Column, levels: Sequence[str]) -> tuple[Column, dict[str, str]]:
    """Return a column with the dictionary's words for its levels, and other word -> level."""
    distinct = dict.fromkeys(column.words[~column.gaps].tolist())
    meant = {
        word: _level_of_number(word, levels) or _meant(word, levels)
        for word in distinct
        if word not in levels
    }
    other = {word: level for word, level in meant.items() if level}
    words = np.array([other.get(word, word) for word in column.words], dtype=object)
    return replace(column, words=words, known=None), other


def _level_of_number(word: str, levels: Sequence[str]) -> str:
    """Return the level whose number a word is in another form, such as 1.0 for 1; "" if none."""
    try:
        return {float(level): level for level in levels}.get(float(word), "")
    except ValueError:
        return ""


def _meant(word: str, levels: Sequence[str]) -> str:
    """Return the level that a word may stand for, or ""."""
    for group in spellings([*levels, word]):
        if word in group and (same := [level for level in levels if level in group]):
            return same[0]
    keys = {key_of(level): level for level in levels}
    if near := get_close_matches(key_of(word), keys, 1, 0.8):
        return keys[near[0]]
    starts = [level for level in levels if key_of(word).startswith(key_of(level))]
    return starts[0] if len(starts) == 1 and len(key_of(starts[0])) == 1 else ""
