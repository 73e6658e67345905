"""Columns of a table: cells, parsed numbers and positions in the file."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyrofl.arguments import check_name, composed
from pyrofl.choices import Missing
from pyrofl.data.tables.wording import listed, refuse_no_file

NO_VALUE = frozenset(("", ".", "na", "n/a", "#n/a", "nan", "-nan", "null"))  # in lower case
MAX_ROUNDING_SDS = 0.01  # largest change of a number by float32 rounding, in standard deviations
UNNAMED = "(column {})"
BOOLEANS = {"true": "True", "false": "False"}  # in any case of letters
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
TRUTHS = frozenset(BOOLEANS.values())
MAX_NUMBER = float(np.finfo(np.float32).max)  # x and y are float32

Rows = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Parsed(NamedTuple):
    """Result of parsing a column's cells: numbers, and whether all are boolean."""

    numbers: NDArray[np.float64]  # [N], NaN where there is none
    is_boolean: bool


@dataclass(frozen=True)
class Column:
    """Column of a table: its cells [N] as text, stripped of blanks.

    Places [N] are the positions: "line 4", or "line 4 of b.csv" with several files.
    """

    file: str
    name: str
    words: NDArray[np.object_]
    places: NDArray[np.object_]
    clash: str = ""  # how the kind of the column differs between files, if it does
    known: Parsed | None = None  # parsed words, if they are known already

    @cached_property
    def _parsed(self) -> Parsed:
        return self.known or _parse(self.words)

    @property
    def numbers(self) -> NDArray[np.float64]:
        """Cells of the column as numbers [N]; NaN for text, 1 for True and 0 for False."""
        return self._parsed.numbers

    @property
    def is_boolean(self) -> bool:
        """Whether all non-missing cells of the column, and at least one, are True or False."""
        return self._parsed.is_boolean

    @cached_property
    def gaps(self) -> Rows:
        """Mask of the column's missing cells: bool [N]."""
        is_missing_value = np.isnan(self.numbers)
        is_missing_value[is_missing_value] = [
            is_missing(word) for word in self.words[is_missing_value]
        ]
        return is_missing_value

    @property
    def odd(self) -> Rows:
        """Mask of the column's non-missing cells that are not numbers: bool [N]."""
        return np.isnan(self.numbers) & ~self.gaps

    @property
    def is_numeric(self) -> bool:
        """Whether numbers are at least half of the column's non-missing cells, and at least one."""
        count = np.count_nonzero(~np.isnan(self.numbers))
        return bool(count) and bool(count >= np.count_nonzero(self.odd))

    @property
    def nature(self) -> str:
        """Description of a non-numeric column's content: an example text, or "no value"."""
        texts = self.words[self.odd]
        return f"text such as {texts[0]!r}" if len(texts) else "no value"

    @property
    def label(self) -> str:
        """File and name of the column as text, the start of error messages."""
        return f"{self.file}: column {self.name}"

    def first(self, rows: Rows) -> str:
        """Describe value and position of the first marked cell, to begin an error message."""
        at = int(rows.argmax())
        return f"{self.label} holds {self.words[at]!r} in {self.places[at]}"

    def at(self, rows: Rows) -> Column:
        """Return the column restricted to the rows marked in `rows`."""
        # Parsing is slow, and a subset of the words may parse differently.
        parsed = Parsed(self.numbers[rows], self.is_boolean)
        return replace(self, words=self.words[rows], places=self.places[rows], known=parsed)

    def refuse_clash(self, cure: str) -> None:
        """Raise ValueError if the column holds numbers in one file and text in another."""
        if self.clash:
            raise ValueError(f"{self.clash}; expected one kind in all files: correct it, or {cure}")

    def refuse_unreadable(self) -> None:
        """Raise ValueError if half of the cells have a decimal comma or are too large."""
        if self.is_numeric:
            return
        for is_such, expected in (
            (DECIMAL_COMMA.fullmatch, "a full stop before decimals, as in 1.5"),
            (exceeds_single, f"numbers of at most {MAX_NUMBER:.1e}: use a larger unit"),
        ):
            is_unreadable = np.array([bool(is_such(word)) for word in self.words])
            if is_unreadable.any() and 2 * is_unreadable.sum() >= (~self.gaps).sum():
                raise ValueError(f"{self.first(is_unreadable)}; expected {expected}")

    def refuse_text(self, expected: str) -> None:
        """Raise ValueError if the column does not hold numbers."""
        if not self.is_numeric:
            raise ValueError(f"{self.label} holds {self.nature}; expected {expected}")

    def refuse_odd(self, cure: str) -> None:
        """Raise ValueError, with a remedy, if a non-missing cell of the column is not a number."""
        pairs = zip(self.words[self.odd], self.places[self.odd], strict=True)
        if cells := [f"{word!r} in {place}" for word, place in pairs]:
            count = len(self.words) - np.count_nonzero(self.gaps) - len(cells)
            raise ValueError(
                f"{self.label} holds {listed(cells, 3)}, and {count} numbers; expected finite "
                f"numbers such as 1.5, at most {MAX_NUMBER:.1e}: correct the cells, or {cure}"
            )

    def single(self) -> NDArray[np.float32]:
        """Return the column as float32; raise ValueError if that loses too much precision."""
        single, low, high = self.numbers.astype(np.float32), self.numbers.min(), self.numbers.max()
        varies = high > low  # the standard deviation has rounding errors, and may be 0
        if varies and np.abs(single - self.numbers).max() > MAX_ROUNDING_SDS * self.numbers.std():
            raise ValueError(
                f"{self.label} runs from {low:.12g} to {high:.12g}; expected numbers that seven "
                "digits distinguish: subtract the smallest from all of them"
            )
        return single

    def refuse_spellings(self) -> None:
        """Raise ValueError if the column writes one number in two ways, such as 1 and 1.0."""
        ways: dict[float, str] = {}
        for word, value, place in zip(self.words, self.numbers, self.places, strict=True):
            if ways.setdefault(value, word) != word:
                raise ValueError(
                    f"{self.label} holds {ways[value]!r} and, in {place}, {word!r}; expected one "
                    "spelling of each class or group"
                )


def tables_by_client(
    table: Mapping[str, Column], client: str, earlier: Collection[str] = ()
) -> dict[str, dict[str, Column]]:
    """Return the table of each client, by the values of the column that names it.

    Args:
        table: column -> its cells, of one file.
        client: name of the column with the names of the clients.
        earlier: clients of other files.

    Raises:
        ValueError: if there is no such column, a row has no client, or a client is in an earlier
            file, too.
    """
    check_name(client, table, "client column")
    names = table[client]
    if names.gaps.any():
        raise ValueError(f"{names.first(names.gaps)}; expected the name of a client in every row")
    if twice := names.words[np.isin(names.words, [*earlier])].tolist():
        raise ValueError(
            f"{names.file} has rows of {twice[0]!r}, and so has an earlier file; expected all rows "
            "of a client in one file"
        )
    others = {name: column for name, column in table.items() if name != client}
    return {
        str(word): {name: column.at(names.words == word) for name, column in others.items()}
        for word in dict.fromkeys(names.words.tolist())
    }


def _parse(words: NDArray[np.object_]) -> Parsed:
    """Parse the cells of a column as booleans or numbers."""
    distinct = set(words)
    if distinct & TRUTHS and all(w in TRUTHS or is_missing(w) for w in distinct):
        truths = [float(word == "True") if word in TRUTHS else nan for word in words]
        return Parsed(np.array(truths), True)
    return Parsed(np.array([number(word) for word in words]), False)


def column_of(file: str, name: str, words: Sequence[str], places: NDArray[np.object_]) -> Column:
    """Build a column from cell texts, normalizing Unicode and spellings of True and False."""
    composed_words = [composed(word) for word in words]
    if all(word.lower() in BOOLEANS or is_missing(word) for word in set(composed_words)):
        composed_words = [BOOLEANS.get(word.lower(), word) for word in composed_words]
    return Column(file, name, np.array(composed_words, dtype=object), places)


def number(word: str) -> float:
    """Parse a number in plain digits; return NaN if it is invalid or exceeds float32.

    >>> [number(word) for word in ("1e3", "1_000", "1,5", "1e39", "inf")]
    [1000.0, nan, nan, nan, nan]
    """
    try:
        value = float(word)
    except ValueError:
        return nan
    plain = "_" not in word and word.isascii()
    return value if plain and abs(value) <= MAX_NUMBER else nan


def exceeds_single(word: str) -> bool:
    """Return whether a cell is a finite number that float32 cannot hold."""
    try:
        return MAX_NUMBER < abs(float(word)) < inf and "_" not in word
    except ValueError:
        return False


def is_missing(word: str) -> bool:
    """Return whether a cell is missing: empty, "NA", "n/a", "NaN", "null" or a full stop."""
    return word.lower() in NO_VALUE


def read(path: str) -> dict[str, Column]:
    """Read a CSV file with a header as columns: name -> column; empty rows are skipped.

    A column without a name is named by its position, as "(column 3)".
    """
    lines, rows = [], []
    refuse_no_file(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for line, cells in _records(file):
                lines.append(line)
                rows.append(cells)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as CSV: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{path} cannot be read as CSV: {_refused_bytes(path, error)}") from error
    except csv.Error as error:
        after = f"after line {lines[-1]}" if lines else "in line 1"
        raise ValueError(f"{path} cannot be read as CSV {after}: {error}") from error
    if len(rows) < 2:
        message = "has a header only" if rows else "is empty"
        raise ValueError(f"{path} {message}; expected a header and at least one row")
    names = _names(path, rows[0])
    for line, cells in zip(lines, rows, strict=True):
        if len(cells) != len(names):
            raise ValueError(
                f"{path}: line {line} has {len(cells)} cells; expected {len(names)}, as in the "
                "header; a cell that holds a comma needs quotes"
            )
        if line > lines[0] and cells == rows[0]:
            raise ValueError(
                f"{path}: line {line} repeats the header; expected it in line {lines[0]} only"
            )
    at = np.array([f"line {line}" for line in lines[1:]], dtype=object)
    cells_of = dict(zip(names, zip(*rows[1:], strict=True), strict=True))
    return {name: column_of(path, name, cells, at) for name, cells in cells_of.items()}


def _refused_bytes(path: str, error: UnicodeError) -> str:
    """Return why a file is not text in UTF-8, and what to do."""
    with open(path, "rb") as file:
        start = file.read(2)
    if start in (b"PK", b"\x1f\x8b"):
        return "it is a spreadsheet or compressed; expected text: unpack it, or save it as CSV"
    return f"{error}; expected UTF-8: save it as CSV UTF-8"


def _records(file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and the cells of each non-empty row of a CSV file."""
    reader = csv.reader(file, strict=True, skipinitialspace=True)
    first = 1
    for cells in reader:
        if any(words := [word.strip() for word in cells]):
            if any("\0" in word for word in words):  # as UTF-16 has it
                raise csv.Error(f"line {first} holds a zero byte; expected text in UTF-8")
            yield first, words
        first = reader.line_num + 1


def _names(path: str, header: list[str]) -> list[str]:
    names = [composed(name) or UNNAMED.format(place) for place, name in enumerate(header, 1)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path}: expected distinct column names, found {listed(twice)} twice")
    for sign in (";", "\t") if len(names) == 1 else ():
        if sign in names[0]:
            raise ValueError(
                f"{path}: the header has {sign!r} and no comma; expected commas (and full stops in "
                "numbers), as pandas writes them"
            )
    return names


def complete(used: Collection[Column], missing: Missing) -> Rows:
    """Return a mask of rows without missing values; raise ValueError if none may be missing."""
    whole: Rows = ~np.any([column.gaps for column in used], axis=0)
    if whole.all() or (missing == "drop" and whole.any()):
        return whole
    column, *others = (c for c in used if c.gaps.any())
    at = int(column.gaps.argmax())
    also = listed([f"{other.name} lacks {other.gaps.sum()}" for other in others], 3)
    message = "missing is 'drop', and no row is left"
    if missing == "error":
        message = (
            "expected a value in every row: use other columns, drop such rows, or fill features "
        )
        message += "(missing='drop' or 'impute', --missing drop)"
    raise ValueError(
        f"{column.label} lacks {column.gaps.sum()} of {len(whole)} values, first in "
        f"{column.places[at]} ({column.words[at]!r}){also and f', {also}'}; {message}"
    )
