"""Warnings about columns that a regression uses: units, spellings, codes for missing values.

Clients report the sums of `ColumnSummary`, counts of codes, and whether one column determines
another in their rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pyrofl.data.tables.column_summary import ColumnSummary, told_of
from pyrofl.data.tables.data_quality import of_codes, of_levels, of_measurements, of_words
from pyrofl.data.tables.row_checks import Cells, determines, of_answers, relation_of
from pyrofl.data.tables.units import of_units
from pyrofl.models.regression.columns import variables
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.rows import kind_of
from pyrofl.user_warnings import warn_user


def warn_of_tables(design: Design, tables: Mapping[str, pd.DataFrame]) -> None:
    """Warn of columns that clients write in different ways, and of cells that are no measurements.

    Args:
        design: the design.
        tables: rows of each client, with the types that the user gave them.

    Warns:
        UserWarning: if clients seem to use different units or spellings, numbers seem to stand for
            missing values, or a predictor determines the response.
    """
    frames = design.clients.frames
    texts = [of_words(design.client, frames, "clients")]
    plain = _plain_texts(design, next(iter(tables.values())))
    for name in _columns(design):
        if name in plain:
            texts.append(of_measurements(name, design.clients.levels[name]))
        if name in _factors(design):
            own = {n for one in design.groups for n in one.group.factors}
            summaries = {site: _levels(frame[name]) for site, frame in frames.items()}
            texts.append(of_levels(name, summaries, are_common=name not in own))
        else:
            numbers = {site: np.asarray(frame[name], float) for site, frame in frames.items()}
            texts.append(of_units(name, {site: told_of(v) for site, v in numbers.items()}))
            texts.append(of_codes(name, list(numbers.values())))
    texts.append(of_answers(design.formula.response, _answers(design)))
    for text in filter(None, texts):
        warn_user(text)


def _columns(design: Design) -> list[str]:
    """Return the columns of the tables, without those of clients and of row weights."""
    first = next(iter(design.clients.frames.values()))
    left = {design.client, *design.further.get("weights", ())}
    return [name for name in first if name not in left]


def _factors(design: Design) -> set[str]:
    """Return the columns whose values are levels."""
    first = next(iter(design.clients.frames.values()))
    texts = {name for name in first if not pd.api.types.is_numeric_dtype(first[name])}
    groups = {name for one in design.groups for name in one.group.factors}
    return texts | groups | set(design.clients.levels)


def _plain_texts(design: Design, table: pd.DataFrame) -> set[str]:
    """Return the columns of text among the predictors that no term declares to be categories."""
    declared = {name for one in design.groups for name in one.group.factors} | {design.client}
    declared |= {name for one in design.groups for name in variables(one.group.text)[1]}
    texts = (design.formula.population, *design.formula.parameters.values())
    declared |= {name for text in texts for name in variables(text)[1]} | {design.formula.response}
    return {
        name
        for name in set(design.clients.levels) - declared
        if kind_of(table[name]) == "text" and not isinstance(table[name].dtype, pd.CategoricalDtype)
    }


def _levels(column: pd.Series) -> ColumnSummary:
    levels = tuple(map(str, column.unique().tolist()))
    return ColumnSummary(len(column), levels=levels)


def _answers(design: Design) -> list[str]:
    """Return the predictors that determine the response in the rows of each client."""
    response, frames = design.formula.response, list(design.clients.frames.values())
    groups = {name for one in design.groups for name in one.group.factors}
    others = {response, *groups}.union(*design.further.values())
    if response not in frames[0]:
        return []
    return [
        name
        for name in _columns(design)
        if name not in others
        and determines([relation_of(_cells(f[name]), _cells(f[response])) for f in frames])
    ]


def _cells(column: pd.Series) -> Cells:
    if pd.api.types.is_numeric_dtype(column):
        return np.asarray(column, float)
    return np.array(column.tolist(), dtype=object)
