"""Checks of a site's rules on the reports and the design of a regression, before they leave.

The likelihood factor of a client has X'X, X'y and y'y, with weights, where X are the columns of its
design and of its groups. A column that only one row has, and a combination of columns that is 0 in
all other rows, therefore reveals that row; so does a column that one row dominates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pyrofl.data.frames import Tables
from pyrofl.data.tables.row_checks import share_of_largest
from pyrofl.data.tables.wording import listed, number_of
from pyrofl.inference.transport.site_rules import BrokenRuleError, SiteRules, check_each
from pyrofl.models.regression.agreement import Agreement, Report
from pyrofl.models.regression.building import Settings, agree
from pyrofl.models.regression.design import OFFSET, RESPONSE_SUFFIX, Design, level_text
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import Formula, read_all
from pyrofl.models.regression.priors import MEANS_LABEL
from pyrofl.models.regression.rows import COLUMNS, frames_of
from pyrofl.models.regression.warning_reports import LABEL as CHECKS

Floats = NDArray[np.float64]

ISOLATED_SHARE = 0.999  # share of a combination's squares, from which the other rows are nearly 0
MIN_SINGULAR_VALUE = 1e-9  # singular value of scaled columns, relative to the largest
MAX_SEARCHED_ROWS = 2000  # rows of the highest leverage among which combinations are searched
DESIGN_LABELS = (MEANS_LABEL, CHECKS)  # reports on the columns of the final design


def checked_reports(
    rules: SiteRules,
    settings: Settings,
    tables: Tables,
    results: Mapping[str, Any],
    label: str,
    reports: Mapping[str, Report],
) -> dict[str, Report]:
    """Return the clients' reports as they may leave.

    Args:
        rules: the site's rules.
        settings: the regression.
        tables: tables of the clients that are here.
        results: what all clients agreed on so far, by label.
        label: what the reports are on.
        reports: client -> report.

    Raises:
        BrokenRuleError: if a rule forbids a report, or the messages of the design.
    """
    frames = frames_of(tables, settings.client)
    here = {name: report for name, report in reports.items() if report is not None}

    def check(name: str) -> None:
        """Check the report of a client."""
        if label == COLUMNS:
            _check_columns(rules, settings, name, frames[name], here[name])
            return
        _check_quantiles(rules, name, label)
        try:
            design = _local_design(settings, name, tables, results)
        except ValueError:
            if label in DESIGN_LABELS:
                raise
            return  # a transform has no values on these rows alone, such as of a constant
        check_design(rules, design, settings.link_name)

    check_each(partial(check, name) for name in here)
    if rules.exact_values:
        return dict(reports)
    return {**reports, **{name: _rounded(label, report) for name, report in here.items()}}


def check_design(rules: SiteRules, design: Design, link: str) -> None:
    """Raise BrokenRuleError if messages on a design's rows would break a rule.

    Args:
        rules: the site's rules.
        design: the design, of the clients that are here.
        link: name of the link.
    """
    check_each(
        partial(_check_client, rules, design, link, name, frame)
        for name, frame in design.clients.frames.items()
    )


def _check_client(
    rules: SiteRules, design: Design, link: str, name: str, frame: pd.DataFrame
) -> None:
    """Raise BrokenRuleError if messages on a client's rows would break rules.

    Combinations of columns are searched only if each column keeps the rules.
    """
    rules.check_rows(name, len(frame))
    columns = {
        f"column {text}": values
        for text, values in design.columns(frame).items()
        if not text.startswith(OFFSET) and not text.endswith(RESPONSE_SUFFIX)
    }
    columns[f"response {design.formula.response}"] = design.y(frame)
    bases: dict[str, Floats] = {}

    def check_parameters() -> None:
        """Check the weights and the number of parameters."""
        bases.update(_bases(design, name, frame, _weights(rules, design, link, name, frame)))
        _check_parameters(rules, name, len(frame), sum(b.shape[1] for b in bases.values()))

    check_each(
        [
            lambda: _check_events(rules, design, name, frame),
            lambda: _check_groups(rules, design, name, frame),
            check_parameters,
            *(partial(_refuse_dominated, rules, name, *each) for each in columns.items()),
        ]
    )
    for parameter, basis in bases.items():
        _refuse_isolated(rules, name, parameter, basis)


def _local_design(
    settings: Settings, name: str, tables: Tables, results: Mapping[str, Any]
) -> Design:
    """Return the design as far as it is agreed on; what is lacking follows from this client."""
    frames = Tables({name: tables.frames[name]})
    copied = json.loads(json.dumps(dict(results)))
    return agree(settings, frames, Agreement(copied), with_checks=False)[0]


def _check_columns(
    rules: SiteRules, settings: Settings, name: str, frame: pd.DataFrame, report: Report
) -> None:
    """Raise BrokenRuleError if the report on a client's columns breaks a rule."""
    whole = frame[list(report["missing"])].dropna()
    family = family_of(settings.family)
    formula = read_all(settings.formula, family.auxiliary)

    def check(column: str) -> None:
        """Check a column."""
        values = whole[column]
        if column == formula.response and family.support == "trials":
            rules.check_events(name, column, {"success": float(values.sum())})
        elif _is_event(formula, column, family.support) and values.nunique() <= 2:
            rules.check_events(name, column, _counts_of(values, formula, column))
        elif report["columns"][column]["numbers"] is None:
            _check_levels(rules, name, f"column {column}", values.tolist())
        else:
            _refuse_dominated(rules, name, f"column {column}", values.to_numpy(dtype=np.float64))

    columns = [column for column in report["columns"] if column != settings.client]
    if report["complete"] < rules.min_rows:  # other columns would break rules for this reason alone
        has_trials = family.support == "trials"
        columns = [
            column
            for column in columns
            if _is_event(formula, column, family.support)
            or (has_trials and column == formula.response)
        ]
    rows_check = partial(rules.check_rows, name, report["complete"])
    check_each([rows_check, *(partial(check, column) for column in columns)])


def _is_event(formula: Formula, column: str, support: str) -> bool:
    """Return whether a column is a binary response, or marks events."""
    if column == formula.response:
        return support == "binary"
    return column == formula.columns.get("event")


def _counts_of(values: pd.Series, formula: Formula, column: str) -> dict[str, float]:
    """Return the number of rows of each of two responses, or of events and censored times."""
    counts = {f"{value!s}": float(n) for value, n in values.value_counts().items()}
    if column != formula.response:
        events = float((values == 1).sum())
        censored = len(values) - events
        return {"event": events} | ({"censored": censored} if censored else {})
    return counts if len(counts) > 1 else counts | {"the other response": 0.0}


def _check_events(rules: SiteRules, design: Design, name: str, frame: pd.DataFrame) -> None:
    """Raise BrokenRuleError if a response that is computed from columns has too few events."""
    y, response = design.y(frame), design.formula.response
    if design.family.support == "binary":
        counts = {"0": float((y == 0).sum()), "1": float((y == 1).sum())}
        rules.check_events(name, response, counts)
    inflated = {"hu", "zi", "zoi"} & design.family.auxiliary.keys()
    ends = ([0.0] if inflated else []) + ([1.0] if "coi" in design.family.auxiliary else [])
    for end in ends:  # whose probability has a predictor of its own, or none
        counts = {f"{end:g}": float((y == end).sum()), "other numbers": float((y != end).sum())}
        if counts[f"{end:g}"]:
            rules.check_events(name, response, counts)
    if design.family.support == "trials":
        trials = design.response_column("trials", frame)
        counts = {"success": float(y.sum()), "failure": float((trials - y).sum())}
        rules.check_events(name, response, counts)
    if "event" in design.roles:
        event = design.response_column("event", frame)
        counts = {"event": float(event.sum())}
        censored = float((1 - event).sum())
        rules.check_events(name, response, counts | ({"censored": censored} if censored else {}))


def _check_groups(rules: SiteRules, design: Design, name: str, frame: pd.DataFrame) -> None:
    """Raise BrokenRuleError if a level of a group that several factors define has few rows."""
    for one in design.groups:
        if one.kind != "client":
            levels = [level_text(level) for level in one.level_of_rows(frame, design.client)]
            _check_levels(rules, name, f"group {one.group.name}", levels)


def _check_levels(rules: SiteRules, name: str, what: str, levels: Sequence[Any]) -> None:
    """Raise BrokenRuleError if levels are rare, many or long."""
    counts = pd.Series(levels).value_counts()
    if (longest := max(len(str(level)) for level in counts.index)) > rules.max_level_characters:
        raise BrokenRuleError(
            name,
            "max-level-characters",
            f"{what} has a level of {longest} characters; expected at most "
            f"{rules.max_level_characters}: write short names of levels",
        )
    rare = [str(level) for level, count in counts.items() if count < rules.min_level_rows]
    if rare:
        raise BrokenRuleError(
            name,
            "min-level-rows",
            f"{what} has levels of fewer rows ({listed(rare, 3)}); expected at least "
            f"{number_of(rules.min_level_rows, 'row')} each: join them with others",
        )
    if len(counts) > rules.max_levels:
        raise BrokenRuleError(
            name,
            "max-levels",
            f"{what} has {len(counts)} levels; expected at most {rules.max_levels}: leave it out "
            "if it identifies persons, or join levels",
        )


def _refuse_dominated(rules: SiteRules, name: str, what: str, values: Floats) -> None:
    """Raise BrokenRuleError if few rows have nearly all of a column's squared deviations."""
    _refuse_share(rules, name, what, (values - np.median(values)) ** 2)


def _refuse_share(rules: SiteRules, name: str, what: str, parts: Floats) -> None:
    """Raise BrokenRuleError if few rows have nearly all of a sum of parts [N]."""
    few = rules.min_level_rows - 1
    if (share := share_of_largest(parts, few)) > rules.max_share:
        shares = (share_of_largest(parts, count) for count in range(1, few + 1))
        count = 1 + sum(one < rules.max_share for one in shares)
        raise _of_share(rules, name, f"{number_of(count, 'row')} of {what}", share)


def _of_share(rules: SiteRules, name: str, what: str, share: float) -> BrokenRuleError:
    verb = "has" if what.startswith("1 row ") else "have"
    is_of_terms = "combination" in what
    cure = "leave it out, cap its numbers or take their logarithm"
    cure = "use fewer terms, knots or levels, or cap their numbers" if is_of_terms else cure
    return BrokenRuleError(
        name,
        "max-share",
        f"{what} {verb} {100 * share:.4g} % of its variation; expected at most "
        f"{100 * rules.max_share:g} %: {cure}",
    )


def _weights(rules: SiteRules, design: Design, link: str, name: str, frame: pd.DataFrame) -> Floats:
    """Return the weights of the rows in X'X [N], up to a factor, where coefficients are 0.

    Raises:
        BrokenRuleError: if few rows have nearly all weight.
    """
    weights: Floats = np.ones(len(frame))
    if "se" in design.formula.columns:
        weights = weights / design.response_column("se", frame) ** 2
    if design.family.column == "trials":
        weights = weights * design.response_column("trials", frame)
    if design.population.offsets:
        offset = design.population.offset(frame)
        if link == "log":
            weights = weights * np.exp(offset - offset.max())
        elif link != "identity":
            weights = weights / (2 + np.exp(np.clip(offset, -700, 700)) + np.exp(-offset))
    _refuse_share(rules, name, "the weights (se, trials or offset)", weights)
    scaled: Floats = weights / weights.max()
    return scaled


def _bases(design: Design, name: str, frame: pd.DataFrame, weights: Floats) -> dict[str, Floats]:
    """Return an orthonormal basis [N, R] of the weighted columns of each linear predictor."""
    root = np.sqrt(weights)[:, None]
    return {p: _basis(root * _matrix(design, p, name, frame)) for p in design.predictors}


def _check_parameters(rules: SiteRules, name: str, rows: int, parameters: int) -> None:
    """Raise BrokenRuleError if there are too many parameters for the rows."""
    if rows < (least := rules.rows_per_parameter * parameters):
        raise BrokenRuleError(
            name,
            "rows-per-parameter",
            f"{rows} rows for {number_of(parameters, 'parameter')}; expected at least {least} "
            "rows: use fewer terms",
        )


def _matrix(design: Design, parameter: str, name: str, frame: pd.DataFrame) -> Floats:
    """Return the columns [N, P] of a linear predictor, with intercept and effects of groups."""
    columns = design.predictors[parameter]
    parts = [columns.evaluate(frame)]
    if columns.has_intercept or design.family.kind in ("ordinal", "cox"):
        parts.append(np.ones((len(frame), 1)))
    for one in design.groups:
        if one.parameter != parameter:
            continue
        z = one.columns.evaluate(frame)
        z = np.column_stack([z] + [np.ones(len(frame))] * one.columns.has_intercept)
        if one.kind != "client":
            codes = one.codes(frame, name, design.client)
            z = np.column_stack([z * (codes == code)[:, None] for code in np.unique(codes)])
        parts.append(z)
    return np.column_stack(parts).astype(np.float64)


def _basis(x: Floats) -> Floats:
    """Return an orthonormal basis [N, R] of the columns of a matrix [N, P]."""
    size = np.sqrt((x**2).sum(0))
    left, values, _ = np.linalg.svd(x[:, size > 0] / size[size > 0], full_matrices=False)
    return left[:, values > MIN_SINGULAR_VALUE * max(values, default=1.0)]


def _refuse_isolated(rules: SiteRules, name: str, parameter: str, basis: Floats) -> None:
    """Raise BrokenRuleError if a combination of columns is nearly 0 in all but few rows.

    The largest share of few rows S in a combination is the largest eigenvalue of the rows and
    columns S of the hat matrix. Sets of one and two rows are searched completely, larger ones by
    adding one row after the other.
    """
    few = rules.min_level_rows - 1
    if not few or not basis.shape[1]:
        return
    leverage = (basis**2).sum(1)
    order = np.argsort(-leverage)[:MAX_SEARCHED_ROWS]
    for first in order[leverage[order] >= ISOLATED_SHARE / few]:
        chosen = [int(first)]
        while len(chosen) < few:
            others = [row for row in order if row not in chosen]
            if not others:
                break
            sets = basis[[[*chosen, row] for row in others]]
            shares = np.linalg.eigvalsh(sets @ sets.transpose(0, 2, 1))[:, -1]
            chosen.append(int(others[int(shares.argmax())]))
        share = float(np.linalg.eigvalsh(basis[chosen] @ basis[chosen].T)[-1])
        if share > ISOLATED_SHARE:
            terms = f"the terms of {parameter}" if parameter else "the terms"
            what = f"{number_of(len(chosen), 'row')} of a combination of {terms}"
            raise _of_share(rules, name, what, share)


def _check_quantiles(rules: SiteRules, name: str, label: str) -> None:
    """Raise BrokenRuleError for reports of exact quantiles and bounds of a spline."""
    call, _, what = label.rpartition(": ")
    is_bounded = "lower_bound" in call and "upper_bound" in call
    if rules.exact_values or not call.startswith("bs("):
        return
    if what.startswith("counts ") or (what == "range" and not is_bounded):
        raise BrokenRuleError(
            name,
            "exact-values",
            f"{call} needs exact values of rows; expected bounds and knots, such as bs(x, "
            "knots=[50, 70], lower_bound=0, upper_bound=120), with several rows between knots",
        )


def _rounded(label: str, report: Report) -> Report:
    """Return a report with smallest and largest numbers rounded outward."""
    if label == COLUMNS:
        columns = {n: _rounded_column(one) for n, one in report["columns"].items()}
        return {**report, "columns": columns}
    if label.endswith(": range"):
        return [*outward(*report)]
    if label == CHECKS:
        classes = []
        for one in report["classes"]:
            ends = [outward(a, b) for a, b in zip(one["low"], one["high"], strict=True)]
            classes.append(one | {"low": [a for a, _ in ends], "high": [b for _, b in ends]})
        largest = {n: outward(0.0, value)[1] for n, value in report["largest"].items()}
        response = [*outward(*report["response"])]
        return report | {"classes": classes, "largest": largest, "response": response}
    return report


def _rounded_column(one: Report) -> Report:
    if one["numbers"] is None:
        return one
    low, high = outward(one["numbers"]["low"], one["numbers"]["high"])
    return one | {"numbers": one["numbers"] | {"low": low, "high": high}}


def outward(low: float, high: float) -> tuple[float, float]:
    """Return a range rounded outward to multiples of the power of ten below its width.

    >>> outward(17.5, 93.0), outward(2.0, 2.0), outward(0.0, 1.0)
    ((10.0, 100.0), (2.0, 2.0), (0.0, 1.0))
    """
    width = high - low
    if not 0 < width < math.inf:
        return low, high
    step = 10.0 ** math.floor(math.log10(width))
    return math.floor(low / step) * step, math.ceil(high / step) * step
