"""Attack on a client's own messages of a regression: which rows follow from them?

The attacker has what a server receives from one client: the reports of the agreement, and for
normal responses the likelihood factor of round one. It looks for

- columns of 0 and 1, and differences of nested ones, that a single row has: their sums of products
  with all columns are that row;
- a response that a single row has, whose extremes are that row;
- few rows: values of each column from count, sum, sum of squares, range and being whole numbers,
  joined to rows by the sums of products;
- exact smallest and largest numbers.

Rows that are listed were recovered exactly. Others may follow from attacks that are not tried, and
from several studies of the same rows.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from pyrofl.arguments import checked
from pyrofl.data.frames import Tables
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.site_rules import SiteRules
from pyrofl.models.regression.agreement import Report
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.priors import MEANS_LABEL, predictor_of
from pyrofl.models.regression.remote import RegressionClient, RegressionServer
from pyrofl.models.regression.rows import COLUMNS
from pyrofl.models.regression.warning_reports import LABEL as CHECKS_LABEL
from pyrofl.models.regression.warning_reports import column_spread, has_intercept

Floats = NDArray[np.float64]

RELATIVE_TOLERANCE = 1e-6  # relative error of a recovered value
MAX_ARRANGED_ROWS = 6  # rows whose order is searched completely
MAX_ARRANGEMENTS = 2000  # arrangements of few rows that are followed
MAX_VALUE_RANGE = 500  # whole numbers in a range in which values are searched


@dataclass(frozen=True)
class RowSums:
    """Sums over a client's rows, of columns by name; the first is 1 in all rows.

    Attributes:
        names: names of the columns.
        products: sums of their products [P, P].
        ranges: smallest and largest number of each column [P, 2], or bounds of them.
    """

    names: tuple[str, ...]
    products: Floats
    ranges: Floats

    @property
    def rows(self) -> int:
        """Number of rows."""
        return round(float(self.products[0, 0]))


RowGuess = tuple[str, dict[str, float]]
"""Source of a row, and its values by column."""


@checked
def rehearse(
    formula: str | Mapping[str, str | float],
    tables: Tables,
    *,
    rules: SiteRules | None = None,
    **settings: Any,
) -> pd.DataFrame:
    """Attack the messages of a site's own clients, and return the rows that they reveal.

    Nothing is sent, and studies that rules forbid are attacked, too.

    Args:
        formula: as of `pyrofl.RegressionClient`, and so are all further settings.
        tables: tables of the clients that are here.
        rules: rules of the site, of which only `exact_values` changes the messages; None is the
            default.
        settings: family, link, priors, center, client and namespace.

    Returns:
        One row for each recovered row: client, row (of its table, the first is 1), source, and the
        recovered values as text; empty if no attack succeeds.

    Raises:
        ValueError: if the tables are invalid for the regression.

    Examples:
        >>> import pandas as pd
        >>> from pyrofl import federations
        >>> table = pd.DataFrame({"age": [41.0, 62.5], "score": [1.5, 2.25]})
        >>> rehearse("score ~ age", federations.from_frames({"bern": table}))[["row", "values"]]
           row                values
        0    1     age 41, score 1.5
        1    2  age 62.5, score 2.25
    """
    exact = (rules or SiteRules()).exact_values
    lenient = SiteRules(1, 1, 0, 1, 1.0, 10**6, 10**6, 10**6, exact_values=exact)
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few rows
        for name in tables.frames:
            attack = _Attack(formula, tables, name, lenient, settings)
            rows += [row for guess in attack.guesses() for row in attack.recovered(*guess)]
    table = pd.DataFrame(rows, columns=["client", "row", "source", "values"])
    return table.drop_duplicates(["client", "row", "values"], ignore_index=True)


class _Attack:
    """Messages of one client, and the rows that follow from them."""

    def __init__(
        self,
        formula: str | Mapping[str, str | float],
        tables: Tables,
        name: str,
        rules: SiteRules,
        settings: Mapping[str, Any],
    ) -> None:
        self.name, self.rules, self.frame = name, rules, tables.frames[name]
        self.messages: dict[str, Report] = {}
        self.reply: Mapping[str, Any] = {}
        self.truth: dict[str, Floats] = {}
        client = RegressionClient(formula, Tables({name: self.frame}), rules=rules, **settings)
        self.server = RegressionServer(formula, [name], **settings)
        try:
            self._exchange(client)
        except ValueError:  # also of a rule
            if not self.messages:
                raise
        used = self.messages[COLUMNS]["missing"]
        is_whole = self.frame[[n for n in used if n in self.frame]].notna().all(axis=1)
        self.numbers = np.flatnonzero(is_whole) + 1
        for column, one in self.messages[COLUMNS]["columns"].items():
            if one["numbers"] is not None:
                self.truth[column] = self.frame.loc[is_whole, column].to_numpy(dtype=np.float64)

    def _exchange(self, client: RegressionClient) -> None:
        """Store the client's reports, its reply in round one and the columns of its rows."""
        while not self.server.is_agreed:
            reply = client.describe(self.server.configure_describe()[self.name])
            self.messages[reply["label"]] = json.loads(reply["reports"])[self.name]
            self.server.aggregate_describe({self.name: reply})
        method, data = client.build(self.server.configure_describe()[self.name])
        design = method.design
        assert design is not None
        self.truth = {n: v for n, v in zip(design.places, data.x.T.numpy(), strict=True)}
        self.truth[design.formula.response] = data.y.numpy()
        server = Server(self.server.method, self.server.names, self.server.sizes, torch.float64)
        self.reply = Client(method, data).train(server.configure_train()[self.name])

    def guesses(self) -> Iterator[RowGuess]:
        """Yield rows that follow from the messages."""
        if self.rules.exact_values:
            yield from _of_extremes(self.messages[COLUMNS])
        if not self.server.is_agreed:
            return
        design, checks = self.server.design, self.messages[CHECKS_LABEL]
        sums = _sums(design, self.messages, self.reply)
        yield from _of_classes(design, checks["classes"])
        yield from _of_single_rows(sums)
        if sums.rows <= MAX_ARRANGED_ROWS:
            yield from _of_few_rows(sums)

    def recovered(self, source: str, values: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the first row that has the values, if there is one."""
        same = np.ones(len(self.numbers), dtype=bool)
        for name, value in values.items():
            same &= np.abs(self.truth[name] - value) <= RELATIVE_TOLERANCE * (1 + abs(value))
        text = ", ".join(f"{name} {value:.10g}" for name, value in values.items())
        about = {"client": self.name, "source": source, "values": text}
        return [about | {"row": int(self.numbers[same][0])}] if same.any() else []


def _sums(design: Design, messages: Mapping[str, Report], reply: Mapping[str, Any]) -> RowSums:
    """Return the sums of products of the location's columns, and of the response if it is there."""
    n, terms = messages[MEANS_LABEL]["rows"], design.terms
    part = messages[MEANS_LABEL]["parts"][predictor_of("")]
    means = np.array(part["mean"]).reshape(-1)
    spread, fixed = column_spread(design, "", means, np.array(part["squares"]).reshape(-1) / n)
    scale = np.where(fixed, 1.0, spread)
    middle = means if has_intercept(design, "") else 0 * means
    centered = np.array(messages[CHECKS_LABEL]["products"][""]).reshape(len(terms), len(terms))
    total = n * means
    products = centered * np.outer(scale, scale) + np.outer(middle, total) + np.outer(total, middle)
    products -= n * np.outer(middle, middle)
    whole = np.block([[np.array([[float(n)]]), total[None]], [total[:, None], products]])
    ends = [_range(messages, name) for name in terms]
    sums = RowSums(("", *terms), whole, np.array([(1.0, 1.0), *ends]))
    return _with_response(design, sums, messages, reply)


def _range(messages: Mapping[str, Report], name: str) -> tuple[float, float]:
    """Return bounds of a column: its range if it is a column of the table."""
    column = messages[COLUMNS]["columns"].get(name)
    if column is not None and column["numbers"] is not None:
        return column["numbers"]["low"], column["numbers"]["high"]
    largest = messages[CHECKS_LABEL]["largest"][name]
    return -largest, largest


def _with_response(
    design: Design, sums: RowSums, messages: Mapping[str, Report], reply: Mapping[str, Any]
) -> RowSums:
    """Add the response to the sums, if the reply is the factor of a linear model.

    Its shift has the products of the response with the deviations of the columns from their means,
    and with the intercept; its square is that of the response.
    """
    terms, population = sums.names[1:], design.population
    is_linear = "up/square" in reply and population.has_intercept and not population.offsets
    if not is_linear or "se" in design.formula.columns or len(terms) >= reply["up/shift"].shape[1]:
        return sums
    shift = reply["up/shift"][0].numpy()
    total = shift[len(terms)]
    means = sums.products[0, 1:] / sums.rows
    cross = np.array([total, *(shift[: len(terms)] + means * total)])
    square = float(reply["up/square"][0])
    products = np.block([[sums.products, cross[:, None]], [cross[None], np.array([[square]])]])
    ends = np.array([messages[CHECKS_LABEL]["response"]])
    names = (*sums.names, design.formula.response)
    return RowSums(names, products, np.concatenate([sums.ranges, ends]))


def _of_extremes(report: Report) -> Iterator[RowGuess]:
    """Yield the smallest and the largest number of each column."""
    for name, one in report["columns"].items():
        for word, end in (("smallest", "low"), ("largest", "high")):
            if one["numbers"] is not None:
                yield f"{word} {name}", {name: one["numbers"][end]}


def _of_classes(design: Design, classes: Sequence[Report]) -> Iterator[RowGuess]:
    """Yield the row of a response that no other row has, from the extremes of its columns."""
    for value, one in enumerate(classes):
        if one["rows"] == 1:
            row = dict(zip(design.terms, one["low"], strict=True))
            yield f"extremes of response {value}", row | {design.formula.response: float(value)}


def _of_single_rows(sums: RowSums) -> Iterator[RowGuess]:
    """Yield rows that a column of 0 and 1 has alone, or a difference of nested ones."""
    g, names = sums.products, sums.names
    places = [k for k in range(len(names)) if _same(g[0, k], g[k, k], g[k, k])]
    for k in places:
        for other in (None, *places):
            if other == k or (
                other is not None and not _same(g[k, other], g[other, other], g[0, 0])
            ):
                continue
            row = g[k] if other is None else g[k] - g[other]
            if _same(row[0], 1.0, 1.0):
                without = "" if other is None else f" without {names[other]}"
                source = f"sums of {names[k] or 'all rows'}{without}"
                yield source, dict(zip(names[1:], row[1:].tolist(), strict=True))


def _same(one: float, other: float, scale: float) -> bool:
    return abs(one - other) <= RELATIVE_TOLERANCE * max(scale, 1.0)


def _of_few_rows(sums: RowSums) -> Iterator[RowGuess]:
    """Yield all rows, if only one arrangement of the columns' values has the sums of products."""
    g, n = sums.products, sums.rows
    values = {
        k: numbers
        for k in range(1, len(sums.names))
        if (numbers := _values(n, g[0, k], g[k, k], *sums.ranges[k])) is not None
    }
    order = sorted(values, key=lambda k: -len(set(values[k])))
    tables = [np.zeros((n, 0))]
    for place, k in enumerate(order):
        near = 1e-7 * np.sqrt(g[k, k] * np.diag(g)[order[:place]])
        arrangements = {
            tuple(sorted(map(tuple, np.column_stack([table, column]).tolist())))
            for table in tables
            for column in set(permutations(values[k]))
            if place or tuple(values[k]) == column
            if (np.abs(np.array(column) @ table - g[k, order[:place]]) <= near).all()
        }
        if not arrangements or len(arrangements) > MAX_ARRANGEMENTS:
            return
        tables = [np.array(table) for table in arrangements]
    if order and len(tables) == 1:
        names = [sums.names[k] for k in order]
        for row in tables[0].tolist():
            yield f"sums of {n} rows", dict(zip(names, row, strict=True))


def _values(n: int, total: float, square: float, low: float, high: float) -> list[float] | None:
    """Return n numbers by their sum and sum of squares, if they are determined; else None."""
    if n == 1:
        return [total]
    spread = max(square - total**2 / n, 0.0)
    if n == 2:
        half = np.sqrt(spread / 2)
        return [float(total / 2 - half), float(total / 2 + half)]
    third = total - low - high
    if n == 3 and _same(low**2 + high**2 + third**2, square, square):
        return sorted([low, third, high])
    is_whole = _same(total, round(total), 1.0) and _same(square, round(square), 1.0)
    if not is_whole or not high - low <= MAX_VALUE_RANGE:
        return None
    ends = int(np.floor(low)), int(np.ceil(high))
    solutions = [*_whole_numbers(n, round(total), round(square), *ends)]
    return [*map(float, solutions[0])] if len(solutions) == 1 else None


def _whole_numbers(
    n: int, total: int, square: int, low: int, high: int
) -> Iterator[tuple[int, ...]]:
    """Yield at most two sets of n whole numbers with a sum and a sum of squares, in order."""

    @cache
    def solutions(n: int, total: int, square: int, low: int) -> tuple[tuple[int, ...], ...]:
        """Return at most two sets of n whole numbers from `low` on."""
        if n == 0:
            return ((),) if total == 0 and square == 0 else ()
        if n * square < total**2 or n * low > total or n * high < total:
            return ()
        every: list[tuple[int, ...]] = []
        for first in range(low, min(high, total // n) + 1):
            rest = solutions(n - 1, total - first, square - first**2, first)
            every += [(first, *one) for one in rest]
            if len(every) > 1:
                break
        return tuple(every[:2])

    yield from solutions(n, total, square, low)
