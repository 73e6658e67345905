"""Order of the categories of an ordinal response, which has to be declared or that of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.agreement import Report
from pyrofl.models.regression.design import Design
from pyrofl.user_warnings import warn_user


def check_order(name: str, frames: Mapping[str, pd.DataFrame]) -> None:
    """Raise ValueError unless the categories of an ordinal response have an order.

    Whole numbers, and categories of pandas that are ordered, or declared in another order than
    that of the alphabet, have one.

    Warns:
        UserWarning: if categories are declared in an order of their own, but not as ordered.
    """
    for site, frame in frames.items():
        column = frame[name].dropna()
        dtype = column.dtype
        categories = dtype.categories if isinstance(dtype, pd.CategoricalDtype) else None
        if categories is not None and dtype.ordered:
            continue
        values = pd.Series(categories if categories is not None else column)
        if is_numeric_dtype(values):
            numbers = values.to_numpy(dtype=np.float64)
            if not (odd := numbers != np.round(numbers)).any():
                continue
            raise ValueError(
                f"{site}: response {name} is {numbers[odd][0]:g}; expected whole numbers, or "
                f"ordered categories: pd.cut(frame[{name!r}], bounds)"
            )
        if categories is None or categories.is_monotonic_increasing:
            raise ValueError(_unknown_order(name, frames))
        warn_user(
            f"the categories of response {name} are not marked as ordered; their declared order is "
            f"used: {' < '.join(map(str, categories))}; pass ordered=True to pd.Categorical"
        )
        return


def _unknown_order(name: str, frames: Mapping[str, pd.DataFrame]) -> str:
    """Return the message for text without an order, with the line that declares it."""
    words = sorted({str(v) for frame in frames.values() for v in frame[name].dropna().unique()})
    if all(word.lstrip("-").isdecimal() for word in words):
        cure = f"frame[{name!r}] = frame[{name!r}].astype(int)"
    else:
        cure = (
            f"frame[{name!r}] = pd.Categorical(frame[{name!r}], [LOWEST, ..., HIGHEST], "
            f"ordered=True), in pyrofl regress --levels {name}=LOWEST,...,HIGHEST, with "
            f"{listed(words)} in their order; or use whole numbers"
        )
    return f"response {name} holds text, whose order is unknown; declare it: {cure}"


def category_warnings(design: Design, reports: Sequence[Report]) -> list[str]:
    """Return texts on whole numbers and on declared categories that no row has.

    Args:
        design: the design.
        reports: of each client, with "seen": whether it has each category.
    """
    if design.family.kind != "ordinal":
        return []
    name, levels = design.formula.response, design.answers
    if isinstance(design.clients.template[name].dtype, pd.CategoricalDtype):
        seen = np.any([one["seen"] for one in reports], 0)
        unused = [str(level) for level, is_seen in zip(levels, seen, strict=True) if not is_seen]
        none = f"no row has {listed(unused)} of response {name}: only priors place its thresholds"
        return [none] if unused else []
    if max(levels) - min(levels) + 1 <= len(levels):
        return []
    numbers = listed([f"{level:g}" for level in levels])
    return [
        f"response {name} holds {numbers}, with gaps: the model has these {len(levels)} "
        f"categories; if there are others, declare all: pd.Categorical(frame[{name!r}], "
        f"[{numbers}, ...], ordered=True) in their order"
    ]
