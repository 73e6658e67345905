"""Warnings before a fit: levels of one client, separation, constant and aliased columns.

They follow from counts, extremes and sums of products of the clients' columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.agreement import Report
from pyrofl.models.regression.category_order import category_warnings
from pyrofl.models.regression.columns import Columns
from pyrofl.models.regression.design import Design, refuse_tiny
from pyrofl.models.regression.priors import design_moments, predictor_of, term_of
from pyrofl.models.regression.rows import total
from pyrofl.models.regression.smooths import Monotonic
from pyrofl.models.regression.warning_reports import column_spread, gather_reports
from pyrofl.nouns import nouns
from pyrofl.user_warnings import warn_user

# Standard deviations between 0 and the mean of a column with effects of groups.
MAX_CENTER_DISTANCE = 4.0
ALIASED = 1e-10  # part of a column's variance that others leave, below which it is aliased


def warn_of_design(design: Design, link: str) -> None:
    """Warn of columns that make coefficients depend on their priors.

    Raises:
        ValueError: if the squares of a column's numbers are all 0.

    Warns:
        UserWarning: if only one client has a level, a column is constant or aliased, it separates
            the two responses, the mean of a column with effects of groups is far from 0, all
            responses are equal, or ordinal responses have gaps.
    """
    moments = design_moments(design, link)
    reports = [*gather_reports(design, link).values()]
    for name in reports[0]["largest"]:
        refuse_tiny(name, max(one["largest"][name] for one in reports))
    ends = [value for one in reports for value in one["response"]]
    refuse_tiny(f"response {design.formula.response}", max(map(abs, ends)))
    texts = _lonely_levels(design)
    for parameter in design.predictors:
        texts += _columns(design, parameter, moments[predictor_of(parameter)], reports)
    texts += [*_separated(design, reports), *_off_center(design, moments)]
    texts += [*_constant(design, ends), *_no_events(design), *category_warnings(design, reports)]
    for text in texts:
        warn_user(text)


def _lonely_levels(design: Design) -> list[str]:
    """Return texts on the levels of population factors that only one client has."""
    clients, warnings_found = design.clients, []
    owners = clients.roster["owners"]
    for name, levels in clients.levels.items():
        if name == design.client or name in {n for one in design.groups for n in one.group.factors}:
            continue
        seen = [set(one) for one in owners[name].values()]
        lonely = [str(v) for v in levels if sum(v in each for each in seen) == 1]
        one = nouns().client
        if lonely and len(seen) > 1:
            warnings_found.append(
                f"only one {one} has level {listed(lonely)} of {name}: that {one} learns its "
                f"coefficient alone, and the coefficient reveals that {one}"
            )
    return warnings_found


def _columns(
    design: Design, parameter: str, moments: tuple[Any, Any], reports: Sequence[Report]
) -> list[str]:
    """Return texts on constant columns, and on columns that others determine."""
    columns = design.predictors[parameter]
    if not columns.labels:
        return []
    terms = [f"{name} of {parameter}" if parameter else name for name in columns.labels]
    _, fixed = column_spread(design, parameter, *moments)
    texts = []
    names = [
        term
        for term, name, is_fixed in zip(terms, columns.labels, fixed, strict=True)
        if is_fixed and name not in columns.curves
    ]
    if names:
        texts.append(
            f"column {listed(names)} is constant; only the prior determines its coefficient"
        )
    texts += _empty_levels(design, columns, moments[0])
    gram = total([one["products"][parameter] for one in reports]) / design.clients.rows
    aliased: list[str] = []
    independent: list[int] = []
    for place, name in enumerate(terms):
        if fixed[place] or columns.labels[place] in columns.curves:
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


def _empty_levels(design: Design, columns: Columns, means: Any) -> list[str]:
    """Return texts on monotonic effects of levels without a row, which their steps share."""
    texts = []
    for block in columns.blocks.values():
        if not isinstance(block.transform, Monotonic):
            continue
        at = [columns.labels.index(label) for label in block.labels]
        shares = -np.diff([1.0, *means[at], 0.0])  # of the rows of each level
        empty = np.flatnonzero(shares < 0.5 / design.clients.rows)
        if len(empty):
            names = block.transform.levels or range(
                low := int(block.transform.low), low + len(shares)
            )
            shown = listed([str(names[k]) for k in empty])
            texts.append(
                f"{block.line} has {len(empty)} levels without a row ({shown}); only priors "
                "separate their steps: recode the levels to 0, 1, 2, ... if none lies between them"
            )
    return texts


def _constant(design: Design, ends: Sequence[float]) -> list[str]:
    """Return a text on responses that are all equal, where they are not categories."""
    is_one = len(set(ends)) == 1 and design.clients.rows > 1
    is_bound = "upper" in design.formula.columns  # such as 0 for events before an upper bound
    if not is_one or is_bound or design.family.support in ("binary", "levels", "trials"):
        return []
    return [f"all responses are {ends[0]:g}; scales and their priors are not meaningful"]


def _no_events(design: Design) -> list[str]:
    """Return a text on times of which none has an event."""
    event = design.clients.numbers.get(design.formula.columns.get("event", ""))
    if event is None or event["high"] > 0:
        return []
    return ["no time has an event; only priors bound the hazards"]


def _separated(design: Design, reports: Sequence[Report]) -> list[str]:
    """Return texts on columns that separate responses 0 from 1, alone."""
    if design.family.support != "binary" or not design.terms:
        return []
    low, high = [], []
    for value in (0, 1):
        extremes = [one["classes"][value] for one in reports if one["classes"][value]["rows"]]
        if not extremes:
            return [f"no response is {value:g}; only priors bound the intercept"]
        low.append(np.min([one["low"] for one in extremes], 0))
        high.append(np.max([one["high"] for one in extremes], 0))
    varies = np.maximum(*high) > np.minimum(*low)
    apart = ((high[0] <= low[1]) | (high[1] <= low[0])) & varies
    terms = zip(design.terms, apart, strict=True)
    names = [n for n, is_apart in terms if is_apart and n not in design.population.curves]
    if not names:
        return []
    return [
        f"column {listed(names)} separates the responses 0 and 1; only the prior bounds its "
        "coefficient"
    ]


def _off_center(design: Design, moments: Mapping[str, Any]) -> list[str]:
    """Return texts on slopes of groups that are nearly collinear with their intercepts."""
    texts = []
    for one in design.groups:
        if not one.columns.has_intercept or not one.columns.labels:
            continue
        term = f"({one.group.text} | {one.group.name})"
        means, squares = moments[term_of(one)]
        far = np.abs(means) > MAX_CENTER_DISTANCE * np.sqrt(squares)
        names = [
            n for n, is_far in zip(one.columns.labels, far & (squares > 0), strict=True) if is_far
        ]
        if names:
            texts.append(
                f"the mean of {listed(names)} in {term} is more than {MAX_CENTER_DISTANCE:g} "
                "standard deviations from 0: slopes and intercepts of groups are nearly "
                f"collinear, and the fit may not converge; write center({names[0]})"
            )
    return texts
