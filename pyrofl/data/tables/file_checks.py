"""Check of CSV files before a study: all problems of all files, each with its cure.

Files are read in whatever format they have; what `pyrofl` itself would refuse is a problem.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyrofl.arguments import composed
from pyrofl.data.tables.column_summary import summarize_values
from pyrofl.data.tables.columns import (
    DECIMAL_COMMA,
    MAX_NUMBER,
    Column,
    Rows,
    column_of,
    exceeds_single,
    is_missing,
    tables_by_client,
)
from pyrofl.data.tables.data_quality import (
    FORMS,
    MAX_CODE_VALUES,
    code_of,
    code_warning,
    key_of,
    measurement_warning,
    number_warning,
    spellings,
)
from pyrofl.data.tables.dictionary import ColumnEntry, dictionary_problems, near_header
from pyrofl.data.tables.owners import name_problem
from pyrofl.data.tables.row_checks import MIN_ROWS, frame_copy_warnings
from pyrofl.data.tables.table_files import read_file
from pyrofl.data.tables.units import unit_warning
from pyrofl.data.tables.wording import listed, number_of, refuse_no_file

SEPARATORS = (",", ";", "\t", "|")
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
ALL_FILES = "all files"
# Ratio of equal letters of two names, from which one may be meant for the other.
MIN_NAME_SIMILARITY = 0.8
MAX_LEVELS = 40  # levels of a column whose spellings are compared
MIN_NUMBERS = 0.5  # part of the cells of a column of numbers that are numbers in most files
NUM_SAMPLED_LINES = 200  # lines on which a format is guessed


class FileFormat(NamedTuple):
    """Format of a CSV file."""

    separator: str
    encoding: str
    decimal: str

    def __str__(self) -> str:
        """Return the format in words."""
        return (
            f"separator {self.separator!r}, encoding {self.encoding}, decimal mark {self.decimal!r}"
        )

    @property
    def is_usual(self) -> bool:
        """Whether `pyrofl` reads files of this format elsewhere, too."""
        name = self.encoding.lower().replace("_", "-")
        is_utf8 = name in ("utf-8", "utf8", "utf-8-sig", "ascii")
        return (self.separator, self.decimal) == (",", ".") and is_utf8


class Problem(NamedTuple):
    """Problem of a column of a file; column "" is of the file, and `ALL_FILES` of several.

    One that may be right, such as an unusual number, is a warning.
    """

    file: str
    column: str
    text: str
    cure: str
    is_warning: bool = False


@dataclass(frozen=True)
class FilesReport:
    """Result of a check of files.

    Attributes:
        guesses: columns that are not checked, as they are not in most files; then, file by file,
            numbers of rows and format.
        problems: all problems, by file.
    """

    guesses: tuple[str, ...]
    problems: tuple[Problem, ...]


def check_files(
    paths: Sequence[str],
    needed: Sequence[str] = (),
    *,
    numbers: Collection[str] = (),
    client: str = "",
    dictionary: Mapping[str, ColumnEntry] | None = None,
    separator: str = "",
    encoding: str = "",
    decimal: str = "",
    na: Sequence[str] = (),
) -> FilesReport:
    """Check the columns of CSV files, one for each client or with a column that names it.

    Args:
        paths: the files.
        needed: columns that a study uses; () is all columns that most files have.
        numbers: those of them that must hold numbers.
        client: column with the names of clients; "" if each file is of one.
        dictionary: column -> type, unit, range and levels, which cells must have.
        separator: mark between cells; "" is guessed, and so are the next two.
        encoding: encoding of the text.
        decimal: mark before decimals.
        na: words that stand for missing values, besides empty cells, "NA" and so on.

    Raises:
        ValueError: if the encoding is unknown, a path is a pipe or a device, a row has no client,
            or a client is in two files.
    """
    entries, how = dictionary or {}, (separator, encoding, decimal, na)
    files, formats, problems = read_tables(paths, client, *how)
    cure = "save it as CSV UTF-8, with commas between cells and decimal points"
    names = dict(zip(paths, short_names(paths), strict=True))
    for path, form in formats.items():
        if not form.is_usual:
            problems.append(Problem(names[path], "", f"has {form}", cure))
    given = tuple(name for name in needed if name != client)
    needed = given or usual_columns(files, problems)
    used = match_columns(files, needed, entries, problems)
    for column in needed:
        parts = {name: table[column] for name, table in used.items() if column in table}
        entry = entries.get(column) or (ColumnEntry("number") if column in numbers else None)
        problems += column_problems(column, parts, entry)
    problems += _copies(used)
    if len(frames := _frames(files)) > 0:
        texts = map(_split, frame_copy_warnings(frames))
        problems += [Problem(ALL_FILES, "", *each, is_warning=True) for each in texts]
    forms = {names[path]: f"; {form}" for path, form in formats.items()}
    guesses = [] if given else left_out_columns(files, used)
    guesses += [
        f"{name}: {_size(table)}{forms.get(_file_of(files[name]), '')}"
        for name, table in used.items()
    ]
    order = [*names.values(), *files]
    problems.sort(key=lambda one: order.index(one.file) if one.file in order else len(order))
    return FilesReport(tuple(guesses), tuple(problems))


def read_tables(
    paths: Sequence[str],
    client: str = "",
    separator: str = "",
    encoding: str = "",
    decimal: str = "",
    na: Sequence[str] = (),
) -> tuple[dict[str, dict[str, Column]], dict[str, FileFormat], list[Problem]]:
    """Return the tables of files in any format, by client; the arguments are as of `check_files`.

    Returns:
        Tables by name of the file, or by client; formats of CSV files by path; and problems of
        lines and headers.
    """
    tables: dict[str, dict[str, Column]] = {}
    formats: dict[str, FileFormat] = {}
    problems: list[Problem] = []
    _refuse_encoding(encoding)
    for path, name in zip(paths, short_names(paths), strict=True):
        refuse_no_file(path)
        try:
            if path.lower().endswith(".parquet"):
                table = read_file(path)
            else:
                formats[path] = guess_format(path, separator, encoding, decimal)
                table = _read(path, name, formats[path], na, problems)
        except OSError as error:
            problems.append(Problem(name, "", f"{path} cannot be read: {error.strerror}", ""))
        except UnicodeError:
            formats.pop(path, None)
            cure = "save it as CSV UTF-8, or name its encoding by --encoding"
            problems.append(Problem(name, "", "is no text table", cure))
        except (ValueError, csv.Error) as error:
            problems.append(Problem(name, "", f"cannot be read: {error}", "save it as CSV UTF-8"))
        else:
            if not table:
                problems.append(Problem(name, "", "is empty", "replace it, or leave it out"))
                continue
            table = {n: replace(column, file=name) for n, column in table.items()}
            parts = tables_by_client(table, client, tables) if client else {name: table}
            for one in parts:
                if text := name_problem(one if client else Path(path).stem):
                    problems.append(Problem(name, client, text, "give it another name"))
            tables |= parts
    return tables, formats, problems


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files, with their folders if two have one name.

    >>> short_names(["a/x.csv", "b/x.csv", "b/y.csv"])
    ['a/x.csv', 'b/x.csv', 'y.csv']
    """
    counts = Counter(Path(path).name for path in paths)
    return [Path(path).name if counts[Path(path).name] == 1 else path for path in paths]


def _file_of(table: Mapping[str, Column]) -> str:
    """Return the name of the file of a table."""
    return next(iter(table.values())).file


def guess_format(
    path: str, separator: str = "", encoding: str = "", decimal: str = ""
) -> FileFormat:
    """Return the format of a CSV file, as far as it is not given.

    Raises:
        OSError: if the file cannot be read.
        UnicodeError: if it has zero bytes, as text has none.
    """
    with open(path, "rb") as file:
        start = file.read(1_000_000)
    if not encoding and b"\0" in start and not start.startswith((*BYTE_ORDER_MARKS,)):
        raise UnicodeError(f"{path} has zero bytes")
    encoding = encoding or _encoding(start)
    lines = start.decode(encoding, errors="replace").splitlines()[:NUM_SAMPLED_LINES]
    if not separator:
        counts = {mark: _columns_of(lines, mark) for mark in SEPARATORS}
        separator = max(SEPARATORS, key=lambda mark: counts[mark])
    if not decimal:
        cells = [cell.strip(' "') for line in lines for cell in line.split(separator)]
        commas = sum(bool(DECIMAL_COMMA.fullmatch(cell)) for cell in cells)
        points = sum(bool(re.fullmatch(r"[-+]?\d+\.\d+", cell)) for cell in cells)
        decimal = "," if separator != "," and commas > points else "."
    return FileFormat(separator, encoding, decimal)


def _refuse_encoding(name: str) -> None:
    """Raise ValueError if an encoding is unknown."""
    try:
        "".encode(name or "utf-8")
    except LookupError as error:
        raise ValueError(
            f"--encoding is {name!r}; expected the name of an encoding, such as cp1252"
        ) from error


def _encoding(start: bytes) -> str:
    """Return the encoding of a file that starts with these bytes."""
    for mark, name in BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            return name
    try:
        start[: len(start) - 4 if len(start) == 1_000_000 else None].decode("utf-8")
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _columns_of(lines: Sequence[str], mark: str) -> int:
    """Return the number of cells of most lines, if it is that of the header; else 1."""
    counts = [len(cells) for cells in csv.reader(lines, delimiter=mark) if cells]
    if not counts:
        return 1
    same = sum(count == counts[0] for count in counts)
    return counts[0] if 2 * same > len(counts) else 1


def _read(
    path: str, name: str, form: FileFormat, na: Sequence[str], problems: list[Problem]
) -> dict[str, Column]:
    """Return the columns of a file, and add problems of its lines and header."""
    rows, places = list[list[str]](), list[str]()
    with open(path, newline="", encoding=form.encoding) as file:
        reader = csv.reader(file, delimiter=form.separator, skipinitialspace=True)
        header = [composed(cell.strip()) for cell in next(reader, [])]
        following = reader.line_num + 1
        for cells in reader:
            # A row with line breaks in quotes is named by its first line.
            line, following = following, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                text = f"line {line} has {len(cells)} cells, and the header"
                cure = "correct the line; cells with a separator need quotes"
                problems.append(Problem(name, "", f"{text} {len(header)}", cure))
                continue
            rows.append([cell.strip() for cell in cells])
            places.append(f"line {line}")
    if header and not rows:
        problems.append(Problem(name, "", "has no row", "leave it out"))
    table: dict[str, Column] = {}
    at = np.array(places, dtype=object)
    for place, column in enumerate(header):
        if column in table:
            problems.append(Problem(name, column, "is there twice", "rename one of them"))
            continue
        words = [_word(row[place], form.decimal, na) for row in rows]
        table[column] = column_of(name, column, words, at)
    return table


def _word(cell: str, decimal: str, na: Sequence[str]) -> str:
    """Return a cell with a decimal point, and empty if it stands for a missing value."""
    if cell in na:
        return ""
    is_number = decimal != "." and re.fullmatch(rf"[-+]?\d*{re.escape(decimal)}\d+", cell)
    return cell.replace(decimal, ".") if is_number else cell


def usual_columns(
    files: Mapping[str, Mapping[str, Column]], problems: list[Problem]
) -> tuple[str, ...]:
    """Return the columns that most files have, by their usual spelling.

    If there is none, this is added to the problems.
    """
    counts = Counter(name for table in files.values() for name in table)
    groups: dict[str, list[str]] = {}
    for name in counts:
        key = key_of(name)
        is_twice = any(sum(key_of(n) == key for n in table) > 1 for table in files.values())
        groups.setdefault(name if is_twice else key, []).append(name)
    usual = tuple(
        max(names, key=lambda name: counts[name])
        for names in groups.values()
        if 2 * sum(counts[name] for name in names) > len(files)
    )
    if files and not usual:
        cure = "rename columns, or name them by --columns"
        problems.append(Problem(ALL_FILES, "", "have no column that most of them have", cure))
    return usual


def left_out_columns(
    files: Mapping[str, Mapping[str, Column]], used: Mapping[str, Mapping[str, Column]]
) -> list[str]:
    """Return a line for each file with columns that are not used, with names nearly like them.

    Args:
        files: file -> its columns.
        used: file -> those that are used, also by another name, see `match_columns`.
    """
    places = {file: {id(column.words) for column in table.values()} for file, table in used.items()}
    others = {
        file: [name for name, column in table.items() if id(column.words) not in places[file]]
        for file, table in files.items()
    }
    lines = list[str]()
    for file, names in others.items():
        words = list[str]()
        for name in names:
            elsewhere = {one for each in others.values() for one in each} - {*names}
            keys = {key_of(one): one for one in sorted(elsewhere)}
            near = get_close_matches(key_of(name), keys, 1, MIN_NAME_SIMILARITY)
            words.append(f"{name} (nearly {keys[near[0]]})" if near else name)
        if words:
            lines.append(f"{file}: left out, as not in most files: {listed(words)}")
    return lines


def match_columns(
    tables: Mapping[str, Mapping[str, Column]],
    needed: Sequence[str],
    dictionary: Mapping[str, ColumnEntry],
    problems: list[Problem],
) -> dict[str, dict[str, Column]]:
    """Return the needed columns of tables, also those of a similar name; add problems of names."""
    return {
        name: _matched(name, table, needed, dictionary, problems) for name, table in tables.items()
    }


def _matched(
    file: str,
    table: Mapping[str, Column],
    needed: Sequence[str],
    dictionary: Mapping[str, ColumnEntry],
    problems: list[Problem],
) -> dict[str, Column]:
    """Return the needed columns of a table, and add problems of names."""
    columns = {name: table[name] for name in needed if name in table}
    others = {key_of(name): name for name in table if name not in needed}
    for name in needed:
        if name in table:
            continue
        other, cure = near_header(name, [*others.values()], dictionary.get(name))
        if not other and (near := get_close_matches(key_of(name), others, 1, MIN_NAME_SIMILARITY)):
            other, cure = others[near[0]], f"rename it {name}"
        if not other:
            cure = "add it, or leave it out of the study"
            problems.append(Problem(file, name, "is missing", cure))
            continue
        del others[key_of(other)]
        problems.append(Problem(file, name, f"is called {other!r}", cure))
        columns[name] = replace(table[other], name=name)
    return columns


def column_problems(
    name: str, parts: Mapping[str, Column], entry: ColumnEntry | None
) -> Iterator[Problem]:
    """Yield the problems of a column in all files; its entry is that of a data dictionary."""
    filled = {file: column for file, column in parts.items() if not column.gaps.all()}
    for file in parts.keys() - filled.keys():
        if len(parts[file].words):
            cure = "fill it, or leave it out of the study"
            yield Problem(file, name, "has no value", cure, is_warning=True)
    numeric = sum(column.is_numeric for column in filled.values())
    if not filled:
        return
    if entry:
        for file, column in filled.items():
            yield from (Problem(file, name, *each) for each in dictionary_problems(column, entry))
    is_category = entry is not None and entry.type == "category"
    if (entry and not is_category) or (2 * numeric >= len(filled) and numeric and not is_category):
        yield from _of_numbers(name, filled, entry)
    elif not (entry and entry.levels):
        yield from _of_levels(name, filled)


def _of_numbers(
    name: str, parts: Mapping[str, Column], entry: ColumnEntry | None
) -> Iterator[Problem]:
    """Yield the problems of a column that holds numbers in most files.

    A code far from all other numbers is a warning if the dictionary has a range for the column.
    """
    is_open = entry is None or (isinf(entry.low) and isinf(entry.high))
    for file, column in parts.items():
        is_large = _too_large(column)
        if is_large.any():
            yield _of_large(file, column, is_large)
        if (is_text := column.odd & ~is_large).any():
            yield _of_texts(file, column, is_text)
        values = column.numbers[~np.isnan(column.numbers)]
        if text := code_warning(name, [values]) if len(values) else "":
            is_far = is_open and (seen := code_of([values])) is not None and seen.is_far
            cure = "leave these cells empty if they are missing values"
            cure += "; else give the column a range in the dictionary" * is_far
            text = _without_column(text, name).partition(";")[0]
            yield Problem(file, name, text, cure, is_warning=not is_far)
        elif len(values) and (text := number_warning(column)):
            yield Problem(file, name, *_split(_without_column(text, name)), is_warning=True)
    sums = {file: summarize_values(column.numbers) for file, column in parts.items()}
    if text := unit_warning(name, sums):
        yield Problem(ALL_FILES, name, *_split(_without_column(text, name)), is_warning=True)


def _too_large(column: Column) -> Rows:
    """Return which cells are numbers that float32 cannot hold: bool [N]."""
    is_large: Rows = np.array([exceeds_single(word) for word in column.words], dtype=bool)
    return is_large & column.odd


def _of_large(file: str, column: Column, is_large: Rows) -> Problem:
    """Return the problem of numbers that are too large."""
    pairs = zip(column.words[is_large], column.places[is_large], strict=True)
    cells = listed([f"{word} in {place}" for word, place in pairs], 3)
    cure = f"write numbers of at most {MAX_NUMBER:.1e}, such as in a larger unit"
    return Problem(file, column.name, f"has {cells}, which is too large", cure)


def _of_texts(file: str, column: Column, is_text: Rows) -> Problem:
    """Return the problem of texts among numbers, in the cells that are marked."""
    words, places = column.words[is_text].tolist(), column.places[is_text].tolist()
    if all(FORMS["dates"].fullmatch(word) for word in words):
        cure = "write numbers, such as days since a date"
        return Problem(file, column.name, f"has dates such as {words[0]!r}", cure)
    cells = [f"{word!r} in {place}" for word, place in zip(words, places, strict=True)]
    rest = int((~np.isnan(column.numbers)).sum())
    text = f"has {listed(cells, 3)}, and {number_of(rest, 'number')}"
    if all(THOUSANDS.fullmatch(word) for word in words):
        other, decimal = words[0].replace(",", ""), words[0].replace(",", ".")
        cure = f"write {other} if the comma marks thousands, and {decimal} if it marks decimals"
        return Problem(file, column.name, text, cure)
    if all(DECIMAL_COMMA.fullmatch(word) for word in words):
        return Problem(file, column.name, text, "write a full stop before decimals")
    return Problem(file, column.name, text, "write numbers, or name these texts by --na")


def _of_levels(name: str, parts: Mapping[str, Column]) -> Iterator[Problem]:
    """Yield the problems of a column of categories: spellings of one word."""
    large = {file: is_large for file, one in parts.items() if (is_large := _too_large(one)).any()}
    if large:
        yield from (_of_large(file, parts[file], cells) for file, cells in large.items())
        return
    counts = {
        file: Counter(word for word in column.words.tolist() if not is_missing(word))
        for file, column in parts.items()
    }
    owners = Counter(word for each in counts.values() for word in each)
    if text := measurement_warning(name, [*owners]):
        problem, cure = _split(_without_column(text, name))
        yield Problem(ALL_FILES, name, problem, cure, is_warning=True)
        return
    for file, column in parts.items():
        values = column.numbers[~np.isnan(column.numbers)]
        if len(np.unique(values)) > MAX_CODE_VALUES:
            text = f"has {number_of(len(values), 'number')} in a column of text"
            cure = "write numbers in all cells and files, or leave it out"
            yield Problem(file, name, text, cure, is_warning=True)
    if len(owners) > MAX_LEVELS:
        return
    total = sum(counts.values(), Counter())
    for group in spellings(owners):
        usual = max(group, key=lambda word: (owners[word], total[word]))
        for file, each in counts.items():
            for word in group:
                if word != usual and each[word]:
                    text = f"has {word!r} in {number_of(each[word], 'row')}, elsewhere {usual!r}"
                    yield Problem(file, name, text, f"write {usual!r}")


def _copies(tables: Mapping[str, Mapping[str, Column]]) -> Iterator[Problem]:
    """Yield each table whose rows are those of an earlier one, in the same order."""
    first: dict[tuple[Any, ...], str] = {}
    for file, table in tables.items():
        cells = tuple((name, *column.words.tolist()) for name, column in sorted(table.items()))
        if not cells or len(cells[0]) <= MIN_ROWS:
            continue
        if (other := first.setdefault(cells, file)) != file:
            yield Problem(file, "", f"has the same rows as {other}", "leave one of them out")


def _without_column(text: str, name: str) -> str:
    """Return a warning without the name of its column."""
    return text.removeprefix(f"column {name}").removeprefix(":").strip()


def _split(text: str) -> tuple[str, str]:
    """Return a warning and its cure, without names of options of other commands."""
    problem, _, cure = text.removesuffix(" (--features)").rpartition("; ")
    return (problem, cure.removeprefix("expected ")) if problem else (text, "")


def _frames(files: Mapping[str, Mapping[str, Column]]) -> dict[str, object]:
    """Return the cells of the files as data frames of text."""
    from pandas import DataFrame

    tables = {name: DataFrame({n: c.words for n, c in t.items()}) for name, t in files.items()}
    return {name: frame for name, frame in tables.items() if len(frame)}


def _size(table: Mapping[str, Column]) -> str:
    """Return the number of rows of the needed columns, and of those without missing values."""
    if not table:
        return "no column of the study"
    gaps = np.any([column.gaps for column in table.values()], axis=0)
    return f"{number_of(len(gaps), 'row')}, {int((~gaps).sum()):,} complete"
