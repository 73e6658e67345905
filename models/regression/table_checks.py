"""Warnings about columns that a regression uses: units, spellings, codes for missing values.

Clients report the sums of `ColumnSummary`, counts of codes, and whether one column determines
another in their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pyrofl.data.frames import place_of
from pyrofl.data.tables.column_summary import ColumnSummary
from pyrofl.data.tables.data_quality import (
    code_warning,
    level_warning,
    lone_cell,
    lone_cell_warning,
    measurement_warning,
    word_warning,
)
from pyrofl.data.tables.row_checks import (
    Cells,
    determined_target_warning,
    is_determined,
    relation_of,
)
from pyrofl.data.tables.units import unit_warning
from pyrofl.models.regression.columns import variables
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.warning_reports import (
    factors_of,
    gather_reports,
    summary_of,
    table_columns,
)
from pyrofl.user_warnings import warn_user


def warn_of_tables(design: Design, link: str) -> None:
    """Warn of columns that clients write in different ways, and of cells that are no measurements.

    Cells are only inspected if the rows of all clients are here.

    Warns:
        UserWarning: if clients seem to use different units or spellings, numbers seem to stand for
            missing values, or a predictor determines the response.
    """
    roster, frames = design.clients.roster, design.clients.frames
    factors, reports = factors_of(design), gather_reports(design, link)
    texts = [word_warning(design.client, roster["sizes"], "clients")]
    plain = _plain_texts(design)
    for name in table_columns(design):
        if name in plain:
            texts.append(measurement_warning(name, design.clients.levels[name]))
        if name in factors:
            own = {n for one in design.groups for n in one.group.factors}
            texts.append(level_warning(name, _levels(design, name), are_common=name not in own))
        else:
            sums = {site: summary_of(one["columns"][name]) for site, one in reports.items()}
            cells = [np.asarray(frame[name], float) for frame in frames.values()]
            texts.append(unit_warning(name, sums))
            texts.append(code_warning(name, cells) or _lone_cell(name, frames))
    texts.append(
        determined_target_warning(design.formula.response, _answers(design) if frames else [])
    )
    for text in filter(None, texts):
        warn_user(text)


def _lone_cell(name: str, frames: Mapping[str, pd.DataFrame]) -> str:
    """Return a warning about a number of one client that explains nearly all the variance."""
    cells = [frame[name].to_numpy(float) for frame in frames.values()]
    if not cells or (lone := lone_cell(values := np.concatenate(cells))) is None:
        return ""
    ends = np.cumsum([len(part) for part in cells])
    which = int(np.searchsorted(ends, lone, "right"))
    site, row = list(frames)[which], int(lone - ends[which])  # from the end
    place = f"{place_of(frames[site], row)} of {site}"
    return lone_cell_warning(name, f"{values[lone]:g}", place, values)


def _levels(design: Design, name: str) -> dict[str, ColumnSummary]:
    """Return the levels of each client in a column; none if they were not reported."""
    roster, frames = design.clients.roster, design.clients.frames
    levels = roster["owners"].get(name, {n: frame[name].unique() for n, frame in frames.items()})
    sizes = roster["sizes"]
    return {n: ColumnSummary(sizes[n], levels=tuple(map(_text, v))) for n, v in levels.items()}


def _text(level: Any) -> str:
    """Return the text of a level; whole numbers are equal in all types of columns."""
    return str(int(level)) if isinstance(level, float) and level.is_integer() else str(level)


def _plain_texts(design: Design) -> set[str]:
    """Return the columns of text among the predictors that no term declares to be categories."""
    declared = {name for one in design.groups for name in one.group.factors} | {design.client}
    declared |= {name for one in design.groups for name in variables(one.group.text)[1]}
    texts = (design.formula.population, *design.formula.parameters.values())
    declared |= {name for text in texts for name in variables(text)[1]} | {design.formula.response}
    is_plain = design.clients.roster["is_plain"]
    return {name for name in set(design.clients.levels) - declared if is_plain[name]}


def _answers(design: Design) -> list[str]:
    """Return the predictors that determine the response in the rows of each client."""
    response, frames = design.formula.response, list(design.clients.frames.values())
    groups = {name for one in design.groups for name in one.group.factors}
    others = {response, *groups}.union(*design.further.values())
    if response not in frames[0]:
        return []
    return [
        name
        for name in table_columns(design)
        if name not in others
        and is_determined([relation_of(_cells(f[name]), _cells(f[response])) for f in frames])
    ]


def _cells(column: pd.Series) -> Cells:
    if pd.api.types.is_numeric_dtype(column):
        return np.asarray(column, float)
    return np.array(column.tolist(), dtype=object)
