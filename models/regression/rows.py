"""Rows of the clients' tables: types, levels and missing values, agreed by unions and counts.

`Clients.agree` is the only way from a client's rows to the others: what its report function returns
is what a client sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from pyrofl.arguments import check_name, did_you_mean
from pyrofl.data import Federation
from pyrofl.data.frames import Tables, number_rows, place_of
from pyrofl.data.tables.wording import listed
from pyrofl.models.regression.agreement import (
    PRIVATE,
    Agreement,
    Report,
    refuse_no_number,
    refuse_unlike,
)
from pyrofl.nouns import nouns
from pyrofl.user_warnings import warn_user

PLAIN = (str, bool, int, float, np.generic)  # types of values in a column of objects
Level = Any  # a text, number or Boolean
COLUMNS, ROSTER = "columns", f"{PRIVATE}roster"
MOST_LEVELS, LONGEST_LEVEL = 10_000, 200  # of a column, and characters of a level
MAX_NUMBER = 1e100  # sums of squares of larger numbers may overflow
PIECES = 256  # into which an exchange divides the interval of an order statistic


class MissingColumn(ValueError):
    """Error for a table without a column of the formula."""

    def __init__(self, text: str, client: str, column: str) -> None:
        super().__init__(text)
        self.client, self.column = client, column


@dataclass(frozen=True)
class Clients:
    """Tables of the clients with equal columns, and what is agreed on them.

    Attributes:
        frames: name of the client -> its rows, of the clients whose rows are here.
        agreement: results that follow from the rows of all clients.
        levels: categorical column -> levels of all clients, in order.
        template: one row with the types of all columns, means of numbers, first levels.
    """

    frames: Mapping[str, pd.DataFrame]
    agreement: Agreement = field(default_factory=Agreement)
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    template: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def example(self) -> pd.DataFrame:
        """Rows on which the structure of a formula is found: those of a client, or the template."""
        return next(iter(self.frames.values()), self.template)

    @property
    def rows(self) -> int:
        """Number of complete rows of all clients."""
        return int(self.agreement.results[COLUMNS]["rows"])

    @property
    def numbers(self) -> dict[str, Mapping[str, Any]]:
        """Numeric column -> its mean, mean square deviation, smallest and largest number."""
        columns = self.agreement.results[COLUMNS]["columns"]
        return {n: one["numbers"] for n, one in columns.items() if one["numbers"] is not None}

    @property
    def roster(self) -> Mapping[str, Any]:
        """Facts on each client, which clients do not receive; empty at a client."""
        roster: Mapping[str, Any] = self.agreement.results.get(ROSTER, {})
        return roster

    def agree(
        self,
        label: str,
        report: Callable[[pd.DataFrame], Report],
        combine: Callable[[Mapping[str, Report]], Any],
        check: Callable[[Report], None] | None = None,
    ) -> Any:
        """Return a result of all clients' rows: `combine` of what each client reports.

        Args:
            label: name of the result.
            report: function of a client's rows.
            combine: function of all reports, by client.
            check: function of a received report that raises ValueError; None compares it with the
                report of the template.
        """

        def as_template(one: Report) -> None:
            refuse_unlike(one, report(self.template))

        def labeled(reports: Mapping[str, Report]) -> dict[str, Any]:
            return {label: combine(reports)}

        return self.agreement.agree(label, self.frames, report, labeled, check or as_template)

    def restrict(self, levels: Mapping[str, tuple[Level, ...]]) -> Clients:
        """Return the clients with the given agreed levels of categorical columns."""
        return replace(self, levels=levels)

    def padded(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, int]:
        """Return rows after extra rows that hold every level, and the number of extra rows.

        Numbers of the extra rows are those of the client's first row.
        """
        count = max([1, *map(len, self.levels.values())])
        extra = frame.iloc[[0] * count].reset_index(drop=True)
        for name in extra.columns:
            if levels := self.levels.get(name):
                values = [levels[i % len(levels)] for i in range(count)]
                extra[name] = pd.Series(values, dtype=frame[name].dtype)
        return pd.concat([extra, frame], ignore_index=True), count


def frames_of(data: Federation | Tables, client: str) -> dict[str, pd.DataFrame]:
    """Return the training rows of each client as a data frame with a column of its name.

    Args:
        data: tables, or a federation with named features.
        client: name of the column that identifies the client.
    """
    frames = data.frames if isinstance(data, Tables) else _of_federation(data)
    frame_by_client = {}
    for name, frame in frames.items():
        if client in frame and frame[client].nunique() > 1:
            raise ValueError(
                f"{name}: column {client} has {frame[client].nunique()} values; expected one, as "
                "it identifies the client"
            )
        frame_by_client[name] = frame if client in frame else frame.assign(**{client: name})
    each = {n: frame[client].dropna().unique().tolist() for n, frame in frame_by_client.items()}
    _refuse_equal_values(client, [(name, value) for name, own in each.items() for value in own])
    return frame_by_client


def _refuse_equal_values(client: str, pairs: Sequence[tuple[str, Level]]) -> None:
    """Raise ValueError if two clients have one value in the column that identifies the client."""
    names: dict[Level, str] = {}
    for name, value in pairs:
        if value in names:
            raise ValueError(
                f"column {client} is {value!r} at {names[value]} and {name}; expected another "
                "value at each client, as it identifies the client"
            )
        names[value] = name


def _of_federation(data: Federation) -> dict[str, pd.DataFrame]:
    """Return the tables of a federation whose features are named numbers."""
    preprocessor = data.source and data.source.preparation
    if data.source is None or data.x.dim() != 2:
        raise ValueError(
            "data has no names of columns; expected federations.from_frames({client: frame}), or "
            "a federation with named features"
        )
    plain = (
        preprocessor is None
        or tuple(str(getattr(c, "name", c)) for c in preprocessor.columns) == data.source.features
    )
    if (
        not plain
        or data.source.is_standardized
        or (preprocessor and "standardized" in preprocessor.summary())
    ):
        raise ValueError(
            "the features of data were prepared; expected raw columns: "
            "federations.from_frames({client: frame}), or scaling='none' without categories"
        )
    frames = {}
    for name, rows in list(zip(data.names, data.train, strict=True))[: data.clients]:
        x, y = data.x[rows].double().cpu().numpy(), data.y[rows].cpu()
        frame = pd.DataFrame(x, columns=list(data.source.features))
        words: Any = y.double().numpy()
        if data.classes:
            words = pd.Categorical.from_codes(y.numpy(), _levels_of_classes(data.classes))
        frames[name] = frame.assign(**{data.source.target: words})
    return frames


def _levels_of_classes(classes: Sequence[str]) -> list[Level]:
    """Return names of classes as levels, which are numbers if all names are whole numbers."""
    is_whole = all(name.lstrip("-").isdecimal() for name in classes)
    return [int(name) for name in classes] if is_whole else list(classes)


def agreed(
    frames: Mapping[str, pd.DataFrame],
    used: Sequence[str],
    factors: Sequence[str],
    groups: Sequence[str],
    client: str,
    agreement: Agreement,
) -> Clients:
    """Return the complete rows of the used columns, with agreed types and levels.

    Args:
        frames: tables of the clients that are here.
        used: columns that the model uses.
        factors: those of them that are categorical, even if they hold numbers.
        groups: those of the factors whose levels are not reported here.
        client: column that identifies the client.
        agreement: results of all clients.

    Raises:
        ValueError: if a column is unknown, or holds numbers at one client and text at another.

    Warns:
        UserWarning: if rows are dropped because of missing values.
    """
    columns = list(dict.fromkeys(n for frame in frames.values() for n in map(str, frame.columns)))
    for name in used if frames else ():
        lacking = [site for site, frame in frames.items() if name not in frame.columns]
        try:
            check_name(name, columns, "column")
        except ValueError as error:
            raise MissingColumn(str(error), lacking[0], name) from None
        if lacking:
            text = (
                f"column {name} is missing at {listed(lacking)}; expected it at all "
                f"{nouns().client.many}{did_you_mean(name, map(str, frames[lacking[0]].columns))}"
            )
            raise MissingColumn(text, lacking[0], name)
    frames = {site: number_rows(frame)[list(used)] for site, frame in frames.items()}
    for name in used:
        _refuse_values(name, frames, factors)
    whole = {site: _complete(frame) for site, frame in frames.items()}
    result = agreement.agree(
        COLUMNS,
        frames,
        lambda frame: _summary(frame, factors, groups, client),
        lambda reports: _combined(reports, client, whole),
        lambda report: _check_summary(report, used, factors, groups, client),
    )
    if ROSTER in agreement.results:
        _warn_of_dropped(agreement.results[ROSTER])
    each = result["columns"]
    levels = {n: tuple(one["levels"]) for n, one in each.items() if one["levels"] is not None}
    bare: dict[str, tuple[Level, ...]] = dict.fromkeys(groups, ())
    typed = {
        site: frame.assign(**{n: _typed(frame[n], levels.get(n, bare.get(n))) for n in used})
        for site, frame in whole.items()
        if len(frame)
    }
    template = pd.DataFrame({n: _typical(each[n]) for n in used})
    return Clients(typed, agreement, levels, template)


def _complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without missing values."""
    whole = frame[~frame.isna().any(axis=1)]
    return whole.infer_objects()  # numbers in a column of objects


def _summary(
    frame: pd.DataFrame, factors: Sequence[str], groups: Sequence[str], client: str
) -> Report:
    """Return the report of a client on its columns: types, levels, counts and sums."""
    whole = _complete(frame)
    columns = {}
    for name in frame.columns if len(whole) else ():
        column = whole[name]
        is_text = kind_of(column) == "text" or name in factors
        is_listed = is_text and name not in groups
        is_declared = isinstance(column.dtype, pd.CategoricalDtype)
        categories = column.cat.categories.tolist() if is_declared and is_listed else None
        columns[name] = {
            "kind": kind_of(column),
            "is_bool": bool(is_bool_dtype(column)),
            "is_declared": is_declared,
            "ordered": categories if _ordered(column) else None,
            "declared": (is_listed and list(_declared_order(column))) or None,
            "categories": categories,
            "levels": column.unique().tolist() if is_listed else None,
            "numbers": None if is_text else _of_numbers(column.to_numpy(dtype=np.float64)),
        }
    return {
        "rows": len(frame),
        "complete": len(whole),
        "missing": {name: int(n) for name, n in frame.isna().sum().items()},
        "client": whole[client].tolist()[0] if len(whole) else None,
        "columns": columns,
    }


def _of_numbers(values: np.ndarray) -> Report:
    """Return mean, sum of squared deviations, smallest and largest of numbers."""
    with np.errstate(all="ignore"):  # infinite numbers are refused later
        mean, squares = moments(values)
    ends = {"low": float(values.min()), "high": float(values.max())}
    return {"mean": float(mean), "squares": float(squares), **ends}


def _combined(
    reports: Mapping[str, Report], client: str, frames: Mapping[str, pd.DataFrame]
) -> dict[str, Any]:
    """Return what all clients agree on, and what the server alone knows of each."""
    there = {site: one for site, one in reports.items() if one["complete"]}
    if not there:
        raise ValueError(
            f"no {nouns().client} has a row without missing values; expected at least one"
        )
    _refuse_equal_values(client, [(site, one["client"]) for site, one in there.items()])
    sizes = {site: one["complete"] for site, one in there.items()}
    columns, owners, is_plain = {}, {}, {}
    for name, first in next(iter(there.values()))["columns"].items():
        parts = {site: one["columns"][name] for site, one in there.items()}
        _refuse_two_kinds(name, parts, frames)
        is_listed = first["levels"] is not None
        columns[name] = {
            "kind": first["kind"],
            "is_bool": first["is_bool"],
            "is_ordered": first["ordered"] is not None,
            "levels": list(_levels(name, list(parts.values()))) if is_listed else None,
            "numbers": _pooled_numbers(parts, sizes) if first["numbers"] else None,
        }
        is_plain[name] = first["kind"] == "text" and not first["is_declared"]
        if is_listed:
            owners[name] = {site: one["levels"] for site, one in parts.items()}
    public = {"clients": len(sizes), "rows": sum(sizes.values()), "columns": columns}
    roster = {
        "sizes": sizes,
        "values": {site: one["client"] for site, one in there.items()},
        "owners": owners,
        "is_plain": is_plain,
        "total": sum(one["rows"] for one in reports.values()),
        "missing": {n: sum(one["missing"][n] for one in reports.values()) for n in columns},
        "gone": [site for site in reports if site not in there],
    }
    return {COLUMNS: {**public, "largest": max(sizes.values())}, ROSTER: roster}


def _pooled_numbers(parts: Mapping[str, Report], sizes: Mapping[str, int]) -> Report:
    """Return mean, mean square deviation and extremes of the numbers of all clients."""
    each = [one["numbers"] for one in parts.values()]
    mean, square = pooled([sizes[site] for site in parts], each)
    ends = min(one["low"] for one in each), max(one["high"] for one in each)
    return dict(
        zip(("mean", "square", "low", "high"), (float(mean), float(square), *ends), strict=True)
    )


def _check_summary(
    report: Report,
    used: Sequence[str],
    factors: Sequence[str],
    groups: Sequence[str],
    client: str,
) -> None:
    """Raise ValueError if a client's report on its columns is invalid."""
    rows = {"rows": 0, "complete": 0, "missing": dict.fromkeys(used, 0)}
    if not isinstance(report, dict) or report.keys() != {*rows, "client", "columns"}:
        raise ValueError("got no report on columns; expected rows, levels and sums")
    refuse_unlike({n: report[n] for n in rows}, rows)
    counts = [report["rows"], report["complete"], *report["missing"].values()]
    if any(not isinstance(n, int) or not 0 <= n <= counts[0] for n in counts):
        raise ValueError(f"got counts {counts}; expected whole numbers of rows")
    columns = report["columns"]
    if not report["complete"]:
        return
    refuse_levels(client, [report["client"]])
    if not isinstance(columns, dict) or list(columns) != list(used):
        got = ", ".join(map(str, columns)) if isinstance(columns, dict) else type(columns).__name__
        raise ValueError(f"got columns {got:.200}; expected {', '.join(used)}")
    for name, one in columns.items():
        _check_column(name, one, name in factors, name in groups)


def _check_column(name: str, one: Report, is_factor: bool, is_group: bool) -> None:
    """Raise ValueError if a client's report on one column is invalid."""
    entries = ("kind", "is_bool", "is_declared", "ordered", "declared", "categories", "levels")
    if not isinstance(one, dict) or tuple(one) != (*entries, "numbers"):
        raise ValueError(f"column {name}: got no report; expected {', '.join(entries)}, numbers")
    if one["kind"] not in ("numbers", "text") or not all(
        isinstance(one[n], bool) for n in ("is_bool", "is_declared")
    ):
        raise ValueError(f"column {name}: got kind {one['kind']!r:.40}; expected numbers or text")
    is_text = one["kind"] == "text" or is_factor
    if (one["levels"] is None) != (is_group or not is_text) or (one["numbers"] is None) != is_text:
        raise ValueError(f"column {name}: expected levels of categories, and sums of numbers")
    for entry in ("ordered", "declared", "categories", "levels"):
        if one[entry] is not None:
            refuse_levels(name, one[entry])
    if one["numbers"] is not None:
        refuse_unlike(one["numbers"], dict.fromkeys(("mean", "squares", "low", "high"), 0.0), name)
        if one["numbers"]["squares"] < 0:
            raise ValueError(f"column {name}: got a negative sum of squares; expected at least 0")


def refuse_levels(name: str, levels: Report) -> None:
    """Raise ValueError unless levels are distinct texts of moderate length, or distinct numbers."""
    if not isinstance(levels, list) or not 0 < len(levels) <= MOST_LEVELS:
        got = f"{len(levels)} levels" if isinstance(levels, list) else f"a {type(levels).__name__}"
        raise ValueError(f"column {name}: got {got}; expected 1 to {MOST_LEVELS:,} levels")
    kinds = {type(level) for level in levels}
    if kinds - {str, bool, int, float} or (str in kinds and len(kinds) > 1):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"column {name}: got levels of type {names}; expected texts or numbers")
    for level in levels:
        if not isinstance(level, str):
            refuse_no_number(int(level) if isinstance(level, bool) else level, f"column {name}")
        elif len(level) > LONGEST_LEVEL or not level.isprintable():
            raise ValueError(
                f"column {name}: got a level of {len(level):,} characters; expected printable "
                f"texts of at most {LONGEST_LEVEL}"
            )
    if len(set(levels)) < len(levels):
        raise ValueError(f"column {name}: got a level twice; expected distinct levels")


def _typical(column: Mapping[str, Any]) -> pd.Series:
    """Return one cell of a column, of its agreed type."""
    levels = column["levels"]
    if levels is not None:
        first = pd.Series(levels[:1])
        if column["is_ordered"] or levels != sorted(levels):
            return pd.Series(pd.Categorical(levels[:1], levels, ordered=True))
        return first
    if column["kind"] == "text":
        return pd.Series([""], dtype=object)
    if column["is_bool"]:
        return pd.Series([False])
    if (numbers := column["numbers"]) is None:
        return pd.Series([0])
    is_whole = float(numbers["low"]).is_integer() and float(numbers["high"]).is_integer()
    # Levels of mo(x) are whole; the ends themselves may be rounded outward.
    return pd.Series([float(round(numbers["mean"])) if is_whole else numbers["mean"]])


def _warn_of_dropped(roster: Mapping[str, Any]) -> None:
    """Warn of rows and clients that are dropped because of missing values."""
    dropped = roster["total"] - sum(roster["sizes"].values())
    if dropped:
        gaps = listed([f"{name} {n}" for name, n in roster["missing"].items() if n])
        lost = f"; no row is left of {listed(roster['gone'])}" if roster["gone"] else ""
        warn_user(
            f"{dropped} of {roster['total']} rows are dropped, as values are missing ({gaps}){lost}"
        )


def _refuse_two_kinds(
    name: str, parts: Mapping[str, Report], frames: Mapping[str, pd.DataFrame]
) -> None:
    """Raise ValueError if a column holds numbers at some clients and text at others."""
    texts, numbers = (
        [site for site, one in parts.items() if one["kind"] == kind] for kind in ("text", "numbers")
    )
    if texts and numbers:
        shown = ""
        if texts[0] in frames:  # else the cells are not here
            column = frames[texts[0]][name]
            odd = pd.to_numeric(column.astype(str), errors="coerce").isna()
            row = int(odd.argmax())  # the first, if all are numbers written as text
            shown = f", such as {column.iloc[row]!r} in {place_of(column, row)} of {texts[0]}"
        raise ValueError(
            f"column {name} holds numbers at {listed(numbers, 3)}, and text at {listed(texts, 3)}"
            f"{shown}; expected one type at all {nouns().client.many}: correct the cells, or "
            f"write the levels as text at all {nouns().client.many}"
        )


def _refuse_values(name: str, frames: Mapping[str, pd.DataFrame], factors: Sequence[str]) -> None:
    """Raise ValueError if a column has values that are not of one type, or no numbers or texts."""
    for site, frame in frames.items():
        column = frame[name].dropna()
        kinds = {type(value) for value in column.tolist()} if column.dtype == object else set()
        if len(kinds) > 1 or any(not issubclass(kind, PLAIN) for kind in kinds):
            kind_names = ", ".join(sorted(kind.__name__ for kind in kinds))
            cells = reversed([*enumerate(column)])
            first = {type(v): f"{v!r:.20} in {place_of(column, row)}" for row, v in cells}
            raise ValueError(
                f"{site}: column {name} holds values of type {kind_names}, such as "
                f"{listed([*first.values()])}; expected numbers, texts or Booleans, all of one type"
            )
        if column.dtype.kind in "mMc" and name not in factors:
            raise ValueError(
                f"{site}: column {name} holds values of type {column.dtype}; expected numbers, "
                "texts or Booleans: compute one of these first"
            )


def kind_of(column: pd.Series) -> str:
    """Return what a column holds: numbers or text."""
    return "numbers" if is_numeric_dtype(column) and not _ordered(column) else "text"


def _ordered(column: pd.Series) -> bool:
    return isinstance(column.dtype, pd.CategoricalDtype) and bool(column.dtype.ordered)


def _levels(name: str, reports: Sequence[Report]) -> tuple[Level, ...]:
    """Return the union of the levels, in their declared order if there is one, else sorted."""
    first = reports[0]["ordered"]
    if first is not None:
        if any(one["ordered"] != first for one in reports):
            raise ValueError(
                f"column {name} is ordered in different ways; expected the same categories "
                f"at all {nouns().client.many}"
            )
        return tuple(first)
    seen = {level for one in reports for level in one["levels"]}
    declared = {tuple(one["declared"]) for one in reports if one["declared"]}
    if not declared:
        return tuple(sorted(seen))
    (order, *others) = declared
    contradicts = any(_contradicts(one["categories"] or (), order) for one in reports)
    if others or not seen <= set(order) or contradicts:
        raise ValueError(
            f"categories of column {name} are declared in different ways; expected the same "
            f"categories at all {nouns().client.many}"
        )
    return tuple(level for level in order if level in seen)


def _declared_order(column: pd.Series) -> tuple[Level, ...]:
    """Return the categories of a column in an order that is not that of the alphabet, or ()."""
    is_categorical = isinstance(column.dtype, pd.CategoricalDtype)
    if not is_categorical or column.cat.categories.is_monotonic_increasing:
        return ()
    return tuple(column.cat.categories.tolist())


def _contradicts(categories: Sequence[Level], order: Sequence[Level]) -> bool:
    """Return whether categories of a column are in another order than the one declared."""
    places = [order.index(level) for level in categories if level in order]
    return places != sorted(places)


def _typed(column: pd.Series, levels: tuple[Level, ...] | None) -> pd.Series:
    """Return a column with the type that all clients use."""
    if _ordered(column):
        return column
    if levels is not None and list(levels) != sorted(levels):
        cells = pd.Categorical(column.tolist(), levels, ordered=True)  # as declared
        return pd.Series(cells, column.index)
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    if is_bool_dtype(column) or levels is not None:
        return column
    return column.astype(np.float64)


def moments(values: Any) -> tuple[Any, Any]:
    """Return means of numbers [N, ...] and their sums of squared deviations."""
    values = np.asarray(values, dtype=np.float64)
    mean = np.where(values.min(0) == values.max(0), values[0], values.mean(0))
    return mean, ((values - mean) ** 2).sum(0)


def pooled(sizes: Sequence[int], parts: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return mean and mean square deviation of all clients' numbers (Chan et al. 1979).

    Args:
        sizes: number of rows of each client.
        parts: "mean" and "squares", as of `moments`, of each client.
    """
    means = [np.asarray(one["mean"], dtype=np.float64) for one in parts]
    weighted = total([n * mean for n, mean in zip(sizes, means, strict=True)]) / sum(sizes)
    is_one = np.min(means, 0) == np.max(means, 0)
    mean = np.where(is_one, means[0], weighted)  # without rounding errors
    between = [n * (one - mean) ** 2 for n, one in zip(sizes, means, strict=True)]
    squares = [np.asarray(one["squares"], dtype=np.float64) for one in parts]
    return mean[()], total([a + b for a, b in zip(squares, between, strict=True)]) / sum(sizes)


def moments_of(
    clients: Clients, label: str, values: Callable[[pd.DataFrame], Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    """Return means and mean square deviations of arrays over the rows of all clients.

    Args:
        clients: the clients.
        label: name of the result.
        values: function of a table that returns arrays [N, ...] by name.
    """

    def report(frame: pd.DataFrame) -> Report:
        """Return the number of rows of a table, and the moments of its arrays."""
        parts = {name: moments(value) for name, value in values(frame).items()}
        pairs = {n: {"mean": m.tolist(), "squares": s.tolist()} for n, (m, s) in parts.items()}
        return {"rows": len(frame), "parts": pairs}

    def combine(reports: Mapping[str, Report]) -> Report:
        """Return the moments of the rows of all clients."""
        sizes = [one["rows"] for one in reports.values()]
        result = {}
        for name in next(iter(reports.values()))["parts"]:
            each = [one["parts"][name] for one in reports.values()]
            mean, square = pooled(sizes, each)
            result[name] = {
                "mean": np.asarray(mean).tolist(),
                "square": np.asarray(square).tolist(),
            }
        return result

    result = clients.agree(label, report, combine)
    return {n: (np.array(v["mean"])[()], np.array(v["square"])[()]) for n, v in result.items()}


def total(parts: Sequence[Any]) -> Any:
    """Return the sum of numbers or arrays of the clients, without rounding errors of the order."""
    arrays = np.stack([np.asarray(part, dtype=np.float64) for part in parts])
    flat = arrays.reshape(len(arrays), -1)
    sums = [math.fsum(column) for column in flat.T]
    return np.array(sums).reshape(arrays.shape[1:])[()]


def quantiles(
    below: Callable[[np.ndarray, int], Sequence[int]],
    count: int,
    ends: tuple[float, float],
    parts: Sequence[float],
) -> list[float]:
    """Return quantiles of all clients' values as numpy does, by counts of values up to bounds.

    Bounds divide the floating-point numbers between the extremes until the counts determine the
    order statistics exactly, in at most nine exchanges.

    Args:
        below: bounds and number of the exchange -> how many values are at most each bound.
        count: number of values.
        ends: smallest and largest value.
        parts: fractions of the values.
    """
    if not parts:
        return []
    places = [part * (count - 1) for part in parts]
    ranks = sorted({int(p) for p in places} | {min(int(p) + 1, count - 1) for p in places})
    statistics_by_rank = dict(zip(ranks, _order_statistics(below, ends, ranks), strict=True))
    answer = []
    for place in places:
        low, share = int(place), place - int(place)
        a, b = statistics_by_rank[low], statistics_by_rank[min(low + 1, count - 1)]
        answer.append(b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share)
    return answer


def _order_statistics(
    below: Callable[[np.ndarray, int], Sequence[int]],
    ends: tuple[float, float],
    ranks: Sequence[int],
) -> list[float]:
    """Return the values of given ranks, from 0, among the values of all clients."""
    first, last = (int(place) for place in _place(np.array(ends)))
    brackets, exchange = [(first, last)] * len(ranks), 0
    while any(low < high for low, high in brackets):
        bounds = [
            [low + (high - low) * k // PIECES for k in range(PIECES)] for low, high in brackets
        ]
        every = np.array([bound for some in bounds for bound in some], dtype=np.int64)
        counts = iter(below(_value(every), exchange))
        for which, (rank, some) in enumerate(zip(ranks, bounds, strict=True)):
            low, high = brackets[which]
            for bound in some:
                if next(counts) > rank:
                    high = min(high, bound)
                else:
                    low = max(low, min(bound + 1, high))
            brackets[which] = low, high
        exchange += 1
    values: list[float] = _value(np.array([low for low, _ in brackets], dtype=np.int64)).tolist()
    return values


def _place(values: Any) -> Any:
    """Return integers in the order of floating-point numbers."""
    bits = (values + 0.0).view(np.int64)
    return np.where(bits < 0, np.int64(-(2**63)) - bits - 1, bits)


def _value(places: Any) -> Any:
    bits = np.where(places < 0, np.int64(-(2**63)) - places - 1, places)
    return bits.astype(np.int64).view(np.float64)


def refuse_large(what: str, values: Any, frame: pd.DataFrame) -> None:
    """Raise ValueError if squares of numbers [N] of the rows of a frame are not finite."""
    if (bad := ~(np.abs(values) < MAX_NUMBER)).any():
        row = int(bad.argmax())
        shown = f"{values[row]:g}" if np.isfinite(values[row]) else "not a finite number"
        raise ValueError(
            f"{what} is {shown} in {place_of(frame, row)}; expected finite numbers below "
            f"{MAX_NUMBER:g}"
        )


def tensor(values: Any) -> torch.Tensor:
    """Return an array as a tensor in double precision."""
    return torch.from_numpy(np.array(values, dtype=np.float64))
