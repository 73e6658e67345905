"""Read tables, CSV or Parquet, from one file, one file per client, or a data frame."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from pyrofl.arguments import composed, did_you_mean
from pyrofl.data.tables.columns import Column, Parsed, column_of, read
from pyrofl.data.tables.wording import listed, refuse_no_file
from pyrofl.user_warnings import warn_user

KINDS = (".csv", ".parquet")
MIN_ROWS = 10  # rows from which equal files are no coincidence
SITE = "site"  # name of the column with the file of each row

Columns = dict[str, Column]


@dataclass(frozen=True)
class Table:
    """Columns of a table by name and, if there are several files, the file of every row."""

    columns: Columns
    sites: tuple[str, ...] = ()  # in the order of the files; () of one file
    site: Column | None = None  # the site of every row
    reordered: tuple[str, ...] = ()  # files whose columns come in another order


def load_table(path: str, needed: Collection[str] | None = None) -> Table:
    """Read a table from one file, all files of a folder, or several separated by commas.

    Several files are sites with the files' names. All need the same columns, or those `needed`.
    """
    files = files_of(path)
    if len(files) == 1:
        return Table(read_file(files[0]))
    sites = tuple(composed(Path(file).stem) for file in files)
    if twice := [site for site, count in Counter(sites).items() if count > 1]:
        names_text = ", ".join(file for file in files if Path(file).stem == twice[0])
        raise ValueError(
            f"{path}: files {names_text} are both called {twice[0]}; expected other names"
        )
    tables = [read_file(file) for file in files]
    for one, other in combinations(range(len(tables)), 2):
        if _are_copies(tables[one], tables[other]):
            pair = f"{files[one]} and {files[other]}"
            text = f"{path}: {pair} hold the same rows; expected other rows at each site"
            warn_user(text)
    wanted = [name for name in tables[0] if needed is None or name in needed]
    for site, file, table in zip(sites, files, tables, strict=True):
        if not set(wanted) <= set(table) or (needed is None and len(table) > len(wanted)):
            _refuse_other_columns(f"{file} (site {site})", table, wanted, files[0], needed is None)
    columns = {name: _together(path, files, [t[name] for t in tables]) for name in wanted}
    lengths = [len(next(iter(table.values())).words) for table in tables]
    words = np.repeat(np.array(sites, dtype=object), lengths)
    site_of = Column(path, SITE, words, next(iter(columns.values())).places)
    order = [[name for name in table if name in columns] for table in tables]
    moved = [Path(f).name for f, names in zip(files, order, strict=True) if names != wanted]
    return Table(columns, sites, site_of, tuple(moved))


def read_file(path: str) -> Columns:
    """Read the columns of a file: as Parquet if its name ends in .parquet, else as CSV."""
    return _parquet(path) if path.lower().endswith(".parquet") else read(path)


def columns_of(table: Any) -> Columns:
    """Return the columns of a table, given as a file, a data frame or a dict."""
    if isinstance(table, str | Path):
        return load_table(str(table)).columns
    if hasattr(table, "columns") and hasattr(table, "iloc"):  # pandas may not be there
        return _of_frame("the table", table)
    if isinstance(table, Mapping) and table:
        if all(isinstance(column, Column) for column in table.values()):
            return dict(table)
        lengths = {name: len(values) for name, values in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the table has columns of {lengths} values; expected equal lengths")
        return {str(name): _column("the table", str(name), v) for name, v in table.items()}
    message = f"the table is a {type(table).__name__}"
    raise ValueError(f"{message}; expected a path, a data frame, or a dict of columns")


def files_of(path: str) -> list[str]:
    """Return the files that a path names: one file, all in a folder, or a comma-separated list."""
    refuse_no_file(path)
    if os.path.isdir(path):
        try:
            listing = sorted(n for n in os.listdir(path) if n.lower().endswith(KINDS))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        # Programs leave the others: "._x.csv" macOS, ".~lock.x.csv#" and ".~x.csv" spreadsheets.
        names = [name for name in listing if not name.startswith(("._", ".~"))]
        if hidden := [name for name in names if name.startswith(".")]:
            warn_user(f"{path}: {listed(hidden, 3)} not read; rename tables that start with a dot")
        file_names = [name for name in names if name not in hidden]
        if not file_names:
            kinds = " or ".join(KINDS)
            raise ValueError(f"{path} is a folder without files; expected {kinds} in it")
        return [os.path.join(path, name) for name in file_names]
    if "," not in path or os.path.exists(path):
        return [path]
    return [part.strip() for part in path.split(",")]


def files_of_each(paths: Sequence[str]) -> list[str]:
    """Return the files that some paths name, see `files_of`.

    Raises:
        ValueError: if one is there twice.
    """
    files = [file for path in paths for file in files_of(path)]
    counts = Counter(map(os.path.abspath, files))
    if twice := [file for file in files if counts[os.path.abspath(file)] > 1]:
        raise ValueError(f"{twice[0]} is named twice; expected each file once")
    return files


def _are_copies(one: Columns, other: Columns) -> bool:
    """Return whether two files have equal cells, and more rows than could be equal by chance."""
    if one.keys() != other.keys() or len(next(iter(one.values())).words) < MIN_ROWS:
        return False
    return all(np.array_equal(one[name].words, other[name].words) for name in one)


def _refuse_other_columns(
    told: str, table: Columns, wanted: Sequence[str], first: str, all_alike: bool
) -> None:
    """Raise ValueError naming columns that a file lacks or, if `all_alike`, has in addition."""
    lacks = [name for name in wanted if name not in table]
    extra = [name for name in table if name not in wanted] if all_alike else []
    if not lacks:
        raise ValueError(
            f"{told} has column {listed(extra, 3)}, which {first} lacks; expected the columns of "
            f"{first}, or the features that are wanted (--features)"
        )
    also = f" and has {listed(extra, 3)} instead" if extra else ""
    cure = did_you_mean(lacks[0], [name for name in table if name not in wanted])
    raise ValueError(
        f"{told} lacks column {listed(lacks, 3)}{also}; expected the columns of {first}{cure}"
    )


def _together(path: str, files: Sequence[str], parts: Sequence[Column]) -> Column:
    """Concatenate the cells of one column from several files."""
    parts = _all_boolean(parts)
    places, kinds = list[str](), dict[str, str]()  # kind -> the first file of it, in words
    for name, part in zip((Path(file).name for file in files), parts, strict=True):
        places += [f"{place} of {name}" for place in part.places]
        if not part.gaps.all():
            kind = "True or False" if part.is_boolean else "numbers" if part.is_numeric else "text"
            kinds.setdefault(kind, f"{part.nature if kind == 'text' else kind} in {name}")
    words = np.concatenate([part.words for part in parts])
    whole = Column(path, parts[0].name, words, np.array(places, dtype=object))
    mixed = [kinds[kind] for kind in ("True or False", "text", "numbers") if kind in kinds]
    if len(mixed) > 1:
        whole = replace(whole, clash=f"{whole.label} holds {mixed[0]}, and {mixed[1]}")
        if "True or False" in kinds:  # booleans count as text next to other kinds
            return whole
    numbers = np.concatenate([part.numbers for part in parts])
    return replace(whole, known=Parsed(numbers, [*kinds] == ["True or False"]))


def _all_boolean(parts: Sequence[Column]) -> Sequence[Column]:
    """Replace 1 and 0 in a column by True and False if it is boolean in another file."""
    some = any(part.is_boolean for part in parts)
    others = [part.numbers for part in parts if not part.is_boolean]
    if not some or not all(
        np.isin(columns[~np.isnan(columns)], (0, 1)).all() for columns in others
    ):
        return parts
    spelled = {1.0: "True", 0.0: "False"}

    def spell(part: Column) -> Column:
        words = [spelled.get(n, word) for n, word in zip(part.numbers, part.words, strict=True)]
        return replace(part, words=np.array(words, dtype=object), known=None)

    return [spell(part) for part in parts]


def _parquet(path: str) -> Columns:
    """Read the columns of a Parquet file with pandas."""
    refuse_no_file(path)
    try:
        import pandas as pd

        frame = pd.read_parquet(path)
    except ImportError as error:
        raise ValueError(
            f"{path} needs pandas and pyarrow; expected pip install -e '.[tables]' in the clone, "
            "or a CSV file"
        ) from error
    except Exception as error:  # what is damaged in a file fails in many ways
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read as Parquet: {why}") from error
    return _of_frame(path, frame)


def _of_frame(file: str, frame: Any) -> Columns:
    if not len(frame) or not len(frame.columns):
        size_text = f"{len(frame)} rows and {len(frame.columns)} columns"
        raise ValueError(f"{file} has {size_text}; expected at least one of each")
    if twice := frame.columns[frame.columns.duplicated()].map(str).tolist():
        raise ValueError(f"{file}: expected distinct column names, found {listed(twice)} twice")
    whole = frame.astype(object).where(frame.notna(), None)
    called = {name: composed(str(name)) for name in frame}
    return {called[name]: _column(file, called[name], whole[name].tolist()) for name in frame}


def _column(file: str, name: str, values: Any) -> Column:
    """Build a column from values in memory; None and masked values are missing."""
    words = [_word(value) for value in values]
    places = np.array([f"row {row}" for row in range(1, len(words) + 1)], dtype=object)
    return column_of(file, name, words, places)


def _word(value: Any) -> str:
    if value is None or value is np.ma.masked:
        return ""
    if isinstance(value, float | np.floating):
        return repr(float(value))
    return str(value).strip()
