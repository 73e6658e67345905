"""Reports of the clients for warnings about their columns, by one exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pyrofl.data.tables.column_summary import ColumnMoments, ColumnSummary, summarize_values
from pyrofl.models.regression.agreement import PRIVATE, Report
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.priors import design_moments, predictor_of

LABEL = f"{PRIVATE}checks"


def gather_reports(design: Design, link: str) -> dict[str, Report]:
    """Return each client's report for the warnings.

    It has counts and moments of its numeric columns; the sums of products of its design's columns,
    scaled by the moments of all clients, and the largest number of each; and the extremes of the
    response, and of the columns by the two responses.
    """
    moments = design_moments(design, link)
    scalings = {n: _scaling(design, n, *moments[predictor_of(n)]) for n in design.predictors}

    def report(frame: pd.DataFrame) -> Report:
        """Return what warnings need of one table."""
        y, is_binary = design.y(frame), design.family.support == "binary" and bool(design.terms)
        x = {name: part.evaluate(frame) for name, part in design.predictors.items()}
        z = {name: (x[name] - middle) / scale for name, (middle, scale) in scalings.items()}
        levels = range(len(design.answers)) if design.family.kind == "ordinal" else ()
        numbers = {n: summarize_values(np.asarray(frame[n], float)) for n in numeric(design)}
        return {
            "columns": {name: _report(summary) for name, summary in numbers.items()},
            "products": {name: (part.T @ part).tolist() for name, part in z.items()},
            "largest": {n: float(np.abs(v).max()) for n, v in design.columns(frame).items()},
            "response": [float(y.min()), float(y.max())],
            "classes": [_extremes(x[""][y == value]) for value in (0.0, 1.0) if is_binary],
            "seen": [int((y == code).any()) for code in levels],
        }

    result: dict[str, Report] = design.clients.agree(LABEL, report, dict)
    return result


def _extremes(x: np.ndarray) -> Report:
    """Return number, smallest and largest values of the rows [N, P]; 0 without rows."""
    if not len(x):
        return {"rows": 0, "low": [0.0] * x.shape[1], "high": [0.0] * x.shape[1]}
    return {"rows": len(x), "low": x.min(0).tolist(), "high": x.max(0).tolist()}


def has_intercept(design: Design, parameter: str) -> bool:
    """Return whether a linear predictor has an intercept, or cut points or a baseline hazard."""
    columns = design.predictors[parameter]
    return columns.has_intercept or design.family.kind in ("ordinal", "cox")


def column_spread(design: Design, parameter: str, means: Any, squares: Any) -> tuple[Any, Any]:
    """Return the spread [P] of columns around their means, or 0, and which are constant."""
    size = np.sqrt(squares + means**2)
    spread = np.sqrt(squares) if has_intercept(design, parameter) else size
    return spread, spread <= 1e-12 * np.maximum(size, 1e-300)


def _scaling(design: Design, parameter: str, means: Any, squares: Any) -> tuple[Any, Any]:
    """Return middle and scale [P] of the columns, for their sums of products."""
    spread, fixed = column_spread(design, parameter, means, squares)
    middle = means if has_intercept(design, parameter) else 0 * means
    return middle, np.where(fixed, 1.0, spread)


def table_columns(design: Design) -> list[str]:
    """Return the columns of the tables, without those of clients and of row weights."""
    names = map(str, design.clients.template)
    left = {design.client, *design.further.get("weights", ())}
    return [name for name in names if name not in left]


def factors_of(design: Design) -> set[str]:
    """Return the columns whose values are levels."""
    first = design.clients.template
    texts = {name for name in first if not pd.api.types.is_numeric_dtype(first[name])}
    groups = {name for one in design.groups for name in one.group.factors}
    return texts | groups | set(design.clients.levels)


def numeric(design: Design) -> list[str]:
    """Return the columns of numbers."""
    factors = factors_of(design)
    return [name for name in table_columns(design) if name not in factors]


def _report(summary: ColumnSummary) -> Report:
    """Return the numbers of a summary as a report."""
    one, logs = summary, summary.logs
    flags = [int(one.has_negative), int(one.has_fractions)]
    return [one.count, one.mean, one.squares, logs.count, logs.mean, logs.squares, *flags]


def summary_of(report: Report) -> ColumnSummary:
    """Return the summary of a report."""
    count, mean, squares, *logs, has_negative, has_fractions = report
    return ColumnSummary(
        count,
        mean=mean,
        squares=squares,
        logs=ColumnMoments(*logs),
        has_negative=bool(has_negative),
        has_fractions=bool(has_fractions),
    )
