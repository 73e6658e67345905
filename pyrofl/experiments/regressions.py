"""Settings, data and priors of `pyrofl regress`."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist

from pyrofl.arguments import check_name, composed
from pyrofl.data.frames import Tables, place_of
from pyrofl.data.tables.columns import Column, number
from pyrofl.data.tables.table_files import files_of, read_file
from pyrofl.experiments.experiment import Experiment
from pyrofl.experiments.settings import read_call

PRIOR = re.compile(r"(.+?)=\s*(\w+\(.*\)|[-+.\w]+)")


@dataclass(frozen=True)
class RegressionExperiment(Experiment):
    """Settings of a regression: formula, family, priors, question, data, training and output."""

    formula: str = ""
    family: str = "gaussian"
    link: str | None = None
    priors: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    question: str | None = None

    @property
    def client(self) -> str:
        """Name of the column that identifies the client."""
        return self.client_column or "client"


def read_tables(experiment: RegressionExperiment) -> Tables:
    """Read the data frame of each client, from a folder of files or from one file.

    Raises:
        ValueError: if the files cannot be read, or one file has no client column.
    """
    kind, _, path = experiment.data.partition(":")
    if kind != "csv" or not path:
        raise ValueError(
            f"--data is {experiment.data!r}; expected csv:FOLDER with one file for each client, or "
            "csv:FILE with --client-column"
        )
    files, words = files_of(path), f"{experiment.formula} {experiment.row_weights}"
    if os.path.isdir(path) or len(files) > 1:
        names = [composed(Path(file).stem) for file in files]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{path} has several files named {twice[0]}; expected distinct names")
        tables = zip(names, map(read_file, files), strict=True)
        frames = {name: frame_of(table, words) for name, table in tables}
        return Tables(with_levels(frames, experiment.levels))
    frame, column = frame_of(read_file(files[0]), words), experiment.client_column
    if column is None:
        raise ValueError(
            f"{path} is one file; expected --client-column COLUMN, or a folder with one file for "
            "each client"
        )
    check_name(column, list(frame), "client column")
    if frame[column].isna().any():
        place = place_of(frame, int(frame[column].isna().argmax()))
        raise ValueError(f"{path}: column {column} is empty in {place}; expected a client's name")
    frames = {str(name): part for name, part in frame.groupby(column, sort=True)}
    return Tables(with_levels(frames, experiment.levels))


def with_levels(frames: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any]:
    """Return tables in which the columns of --levels are ordered categories.

    Raises:
        ValueError: if a text is not COLUMN=A,B,..., a column is unknown or a value no level.
    """
    names = [text.partition("=")[0] for text in words]
    for text in words:
        name, sign, rest = text.partition("=")
        if names.count(name) > 1:
            raise ValueError(f"--levels gives {name} twice; expected one list for each column")
        levels = [composed(level.strip()) for level in rest.split(",")]
        if not name or not sign or len(levels) < 2 or "" in levels:
            raise ValueError(
                f"--levels is {text!r}; expected COLUMN=LEVEL,LEVEL,... with two or more levels"
            )
        if twice := next((one for one in levels if levels.count(one) > 1), ""):
            raise ValueError(f"--levels gives {twice} twice; expected each level of {name} once")
        columns = dict.fromkeys(str(n) for frame in frames.values() for n in frame)
        check_name(name, columns, "column of --levels:")
        frames = {site: _with_levels(site, frame, name, levels) for site, frame in frames.items()}
    return frames


def _with_levels(site: str, frame: Any, name: str, levels: list[str]) -> Any:
    """Return a table in which a column has ordered categories."""
    from pandas import Categorical

    if name not in frame:
        return frame
    column = frame[name]
    if column.dtype.kind == "b":
        column = column.map(str)
    if column.dtype.kind in "iuf":  # the levels are numbers
        column = column.map(lambda value: next((w for w in levels if number(w) == value), value))
    odd = column[column.notna() & ~column.isin(levels)]
    if len(odd):
        raise ValueError(
            f"{site}: column {name} holds {odd.iloc[0]!s}, which is no level of --levels; expected "
            f"one of {', '.join(levels)}"
        )
    return frame.assign(**{name: Categorical(column, levels, ordered=True)})


def frame_of(columns: dict[str, Column], text: str) -> Any:
    """Return columns as a data frame of numbers, Booleans and texts, with the places of its rows.

    Cells that are no numbers are refused in columns whose names occur in a text, as a formula.
    """
    from pandas import DataFrame, Index

    words = {*re.findall(r"[\w.]+", text)}
    places = [place.split()[:2] for place in next(iter(columns.values())).places]
    index = Index([int(number) for _, number in places], name=places[0][0])
    values = {name: _values(column, name in words) for name, column in columns.items()}
    return DataFrame(values, index=index)


def _values(column: Column, is_used: bool) -> Any:
    """Return the cells of a column, with NaN or None where they are missing."""
    if is_used and column.is_numeric and not column.is_boolean:
        column.refuse_odd("write text in all cells of the column")
    if column.is_numeric and not column.is_boolean and not column.odd.any():
        values, whole = column.numbers, np.round(column.numbers)
        is_whole = bool((whole == values).all()) and bool((np.abs(whole) < 2**53).all())
        return whole.astype(np.int64) if is_whole else values
    words = [None if gap else word for word, gap in zip(column.words, column.gaps, strict=True)]
    if column.is_boolean and not column.gaps.any():
        return column.numbers.astype(bool)
    return np.array(words, dtype=object)


INVALID = re.compile(r"parameter (\w+) .* the constraint (\w+)(?:\(lower_bound=([-\d.]+)\))?, but")
"""Error of torch for an invalid parameter."""


def read_priors(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the priors of --prior: name -> Pyro distribution, or concentration of an LKJ prior.

    Raises:
        ValueError: if a text is not NAME=DIST with numbers, or the distribution is unknown.

    >>> read_priors(("age=Normal(0, 2.5)", "corr=2"))
    {'age': Normal(loc: 0.0, scale: 2.5), 'corr': 2.0}
    """
    priors: dict[str, Any] = {}
    for text in words:
        parts = PRIOR.fullmatch(text.strip())
        if parts is None:
            raise ValueError(f"--prior is {text!r}; expected NAME=DIST, as 'age=Normal(0, 1)'")
        name = parts[1].strip()
        if name in priors:
            raise ValueError(f"--prior gives {name} twice; expected one prior for each name")
        priors[name] = _prior(parts[2], text)
    return priors


def _prior(code: str, text: str) -> Any:
    """Return the distribution of a text such as "Normal(0, 1)", or its number."""
    try:
        call = read_call(code)
        if call is None:
            return float(code)
        name, arguments, named = call
    except ValueError as error:
        raise ValueError(
            f"--prior is {text!r}; expected NAME=DIST with numbers, as 'age=Normal(0, 1)'"
        ) from error
    check_name(name, [n for n in dist.__all__ if n[0].isupper()], "distribution")
    try:
        return getattr(dist, name)(*arguments, **named)
    except Exception as error:  # whatever the distribution refuses
        why = " ".join(str(error).split())
        if odd := INVALID.search(why):
            words = re.sub(r"(?<!^)(?=[A-Z])", " ", odd[2]).lower()
            bound = f" {float(odd[3]):g}" if odd[3] else ""
            why = f"its {odd[1]} is invalid; expected one that is {words}{bound}"
        raise ValueError(f"--prior is {text!r}: {why}") from error
