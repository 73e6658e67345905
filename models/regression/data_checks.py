"""Warnings before a fit: levels of one client, separation, constant and aliased columns.

They follow from counts, extremes and sums of products of the clients' columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.ordinal import gaps
from pyrofl.models.regression.rows import mean_of, total
from pyrofl.user_warnings import warn_user

FAR = 4.0  # standard deviations between 0 and the mean of a column with effects of groups
ALIASED = 1e-10  # part of a column's variance that others leave, below which it is aliased


def warn_of_design(design: Design) -> None:
    """Warn of columns that make coefficients depend on their priors.

    Warns:
        UserWarning: if only one client has a level, a column is constant or aliased, it separates
            the two responses, the mean of a column with effects of groups is far from 0, all
            responses are equal, or ordinal responses have gaps.
    """
    texts = _lonely_levels(design)
    texts += [text for parameter in design.predictors for text in _columns(design, parameter)]
    texts += _separated(design)
    texts += [*_off_center(design), *_constant(design), *gaps(design)]
    for text in texts:
        warn_user(text)


def _lonely_levels(design: Design) -> list[str]:
    """Return texts on the levels of population factors that only one client has."""
    clients, warnings_found = design.clients, []
    for name, levels in clients.levels.items():
        if name == design.client or name in {n for one in design.groups for n in one.group.factors}:
            continue
        seen = [set(frame[name].unique().tolist()) for frame in clients.frames.values()]
        lonely = [str(v) for v in levels if sum(v in one for one in seen) == 1]
        if lonely and len(seen) > 1:
            warnings_found.append(
                f"only one client has level {listed(lonely)} of {name}: that client learns its "
                "coefficient alone, and the coefficient reveals that client"
            )
    return warnings_found


def _columns(design: Design, parameter: str = "") -> list[str]:
    """Return texts on constant columns, and on columns that others determine."""
    clients, columns = design.clients, design.predictors[parameter]
    if not columns.labels:
        return []
    terms = [f"{name} of {parameter}" if parameter else name for name in columns.labels]
    means, squares = (np.atleast_1d(v) for v in mean_of(clients, columns.evaluate))
    has_intercept = columns.has_intercept or design.family.kind in ("ordinal", "cox")
    size = np.sqrt(squares + means**2)
    spread = np.sqrt(squares) if has_intercept else size
    fixed = spread <= 1e-12 * np.maximum(size, 1e-300)
    texts = []
    if fixed.any():
        names = [n for n, is_fixed in zip(terms, fixed, strict=True) if is_fixed]
        texts.append(
            f"column {listed(names)} is constant; only the prior determines its coefficient"
        )
    middle = means if has_intercept else 0 * means
    scale = np.where(fixed, 1.0, spread)

    def products(frame: pd.DataFrame) -> Any:
        z = (columns.evaluate(frame) - middle) / scale
        return z.T @ z

    gram = total(clients.report(products)) / sum(map(len, clients.frames.values()))
    aliased: list[str] = []
    independent: list[int] = []
    for place, name in enumerate(terms):
        if fixed[place]:
            continue
        left = gram[place, place]
        if independent:
            cross = gram[independent, place]
            left = (
                left
                - cross
                @ np.linalg.lstsq(gram[np.ix_(independent, independent)], cross, rcond=None)[0]
            )
        if left < ALIASED:
            aliased.append(name)
        else:
            independent.append(place)
    if aliased:
        texts.append(
            f"column {listed(aliased)} is a combination of the others (aliased); only the prior "
            "separates their coefficients"
        )
    return texts


def _constant(design: Design) -> list[str]:
    """Return a text on responses that are all equal, where they are not categories."""
    values = {float(v) for y in design.clients.report(design.y) for v in (y.min(), y.max())}
    is_one = len(values) == 1 and sum(map(len, design.clients.frames.values())) > 1
    if not is_one or design.family.support in ("binary", "levels", "trials"):
        return []
    return [f"all responses are {values.pop():g}; scales and their priors are not meaningful"]


def _separated(design: Design) -> list[str]:
    """Return texts on columns that separate responses 0 from 1, alone."""
    if design.family.support != "binary" or not design.terms:
        return []
    low, high = [], []
    for value in (0.0, 1.0):
        extremes = [
            (x.min(0), x.max(0))
            for frame in design.clients.frames.values()
            if len(x := design.population.evaluate(frame)[design.y(frame) == value])
        ]
        if not extremes:
            return [f"no response is {value:g}; only priors bound the intercept"]
        low.append(np.min([a for a, _ in extremes], 0))
        high.append(np.max([b for _, b in extremes], 0))
    varies = np.maximum(*high) > np.minimum(*low)
    apart = ((high[0] <= low[1]) | (high[1] <= low[0])) & varies
    names = [n for n, is_apart in zip(design.terms, apart, strict=True) if is_apart]
    if not names:
        return []
    return [
        f"column {listed(names)} separates the responses 0 and 1; only the prior bounds its "
        "coefficient"
    ]


def _off_center(design: Design) -> list[str]:
    """Return texts on slopes of groups that are nearly collinear with their intercepts."""
    texts = []
    for one in design.groups:
        if not one.columns.has_intercept or not one.columns.labels:
            continue
        means, squares = (np.atleast_1d(v) for v in mean_of(design.clients, one.columns.evaluate))
        far = np.abs(means) > FAR * np.sqrt(squares)
        names = [
            n for n, is_far in zip(one.columns.labels, far & (squares > 0), strict=True) if is_far
        ]
        term = f"({one.group.text} | {one.group.name})"
        if names:
            texts.append(
                f"the mean of {listed(names)} in {term} is more than {FAR:g} standard deviations "
                "from 0: slopes and intercepts of groups are nearly collinear, and the fit may not "
                f"converge; write center({names[0]})"
            )
    return texts
