"""Rows of the clients' tables: types, levels and missing values, agreed by unions and counts.

`Clients.report` is the only way from a client's rows to the others: what its function returns is
what a client sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from pyrofl.arguments import check_name, did_you_mean
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.data.tables.wording import listed
from pyrofl.user_warnings import warn_user

PLAIN = (str, bool, int, float, np.generic)  # types of values in a column of objects
R = TypeVar("R")
Level = Any  # a text, number or Boolean


@dataclass(frozen=True)
class Clients:
    """Tables of the clients with equal columns, and what is agreed on them.

    Attributes:
        frames: name of the client -> its rows.
        levels: categorical column -> levels of all clients, in order.
    """

    frames: Mapping[str, pd.DataFrame]
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)

    def report(self, function: Callable[[pd.DataFrame], R]) -> list[R]:
        """Return what each client reports: the function of its rows."""
        return [function(frame) for frame in self.frames.values()]

    def restrict(self, levels: Mapping[str, tuple[Level, ...]]) -> Clients:
        """Return the clients with the given agreed levels of categorical columns."""
        return replace(self, levels=levels)

    def padded(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, int]:
        """Return rows after extra rows that hold every level, and the number of extra rows.

        Numbers of the extra rows are those of the client's first row.
        """
        count = max([1, *map(len, self.levels.values())])
        columns = {}
        for name in frame.columns:
            dtype = frame[name].dtype
            levels = self.levels.get(name) or (frame[name].iloc[0],)
            values = [levels[i % len(levels)] for i in range(count)]
            extra = pd.Series(values, dtype=dtype)
            columns[name] = pd.concat([extra, frame[name]], ignore_index=True)
        return pd.DataFrame(columns), count


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
    values: dict[Level, str] = {}
    for name, frame in frame_by_client.items():
        for value in frame[client].dropna().unique().tolist():
            if value in values:
                raise ValueError(
                    f"column {client} is {value!r} at {values[value]} and {name}; expected another "
                    "value at each client, as it identifies the client"
                )
            values[value] = name
    return frame_by_client


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
        or data.source.is_standardised
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
    frames: Mapping[str, pd.DataFrame], used: Sequence[str], factors: Sequence[str]
) -> Clients:
    """Return the complete rows of the used columns, with agreed types and levels.

    Args:
        frames: tables of the clients.
        used: columns that the model uses.
        factors: those of them that are categorical, even if they hold numbers.

    Raises:
        ValueError: if a column is unknown, or holds numbers at one client and text at another.

    Warns:
        UserWarning: if rows are dropped because of missing values.
    """
    columns = list(dict.fromkeys(n for frame in frames.values() for n in map(str, frame.columns)))
    for name in used:
        check_name(name, columns, "column")
        lacking = [site for site, frame in frames.items() if name not in frame.columns]
        if lacking:
            raise ValueError(
                f"column {name} is missing at {listed(lacking)}; expected it at all clients"
                f"{did_you_mean(name, map(str, frames[lacking[0]].columns))}"
            )
    for name in used:
        _refuse_values(name, frames, factors)
    complete_frames = _complete({site: frame[list(used)] for site, frame in frames.items()})
    for name in used:
        _refuse_two_kinds(name, complete_frames)
    first = next(iter(complete_frames.values()))
    texts = [name for name in used if kind_of(first[name]) == "text" or name in factors]
    levels = {name: _levels([frame[name] for frame in complete_frames.values()]) for name in texts}
    typed = {
        site: frame.assign(**{n: _typed(frame[n], levels.get(n)) for n in used})
        for site, frame in complete_frames.items()
    }
    return Clients(typed, levels)


def _refuse_two_kinds(name: str, frames: Mapping[str, pd.DataFrame]) -> None:
    """Raise ValueError if a column holds numbers at some clients and text at others."""
    kinds = {site: kind_of(frame[name]) for site, frame in frames.items()}
    texts, numbers = ([s for s in kinds if kinds[s] == kind] for kind in ("text", "numbers"))
    if texts and numbers:
        column = frames[texts[0]][name]
        odd = pd.to_numeric(column.astype(str), errors="coerce").isna()
        row = int(odd.argmax())  # the first, if all are numbers written as text
        raise ValueError(
            f"column {name} holds numbers at {listed(numbers, 3)}, and text at {listed(texts, 3)}, "
            f"such as {column.iloc[row]!r} in row {row} of {texts[0]}; expected one type at all "
            f"clients: correct the cells, or write the levels as text at all clients"
        )


def _refuse_values(name: str, frames: Mapping[str, pd.DataFrame], factors: Sequence[str]) -> None:
    """Raise ValueError if a column has values that are not of one type, or no numbers or texts."""
    for site, frame in frames.items():
        column = frame[name].dropna()
        kinds = {type(value) for value in column.tolist()} if column.dtype == object else set()
        if len(kinds) > 1 or any(not issubclass(kind, PLAIN) for kind in kinds):
            kind_names = ", ".join(sorted(kind.__name__ for kind in kinds))
            first = {type(v): f"{v!r:.20} in row {row}" for row, v in reversed([*column.items()])}
            raise ValueError(
                f"{site}: column {name} holds values of type {kind_names}, such as "
                f"{listed([*first.values()])}; expected numbers, texts or Booleans, all of one type"
            )
        if column.dtype.kind in "mMc" and name not in factors:
            raise ValueError(
                f"{site}: column {name} holds values of type {column.dtype}; expected numbers, "
                "texts or Booleans: compute one of these first"
            )


def _complete(frames: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the rows without missing values; warn of dropped rows and clients."""
    whole = {site: frame[~frame.isna().any(axis=1)] for site, frame in frames.items()}
    complete_frames = {
        site: frame.reset_index(drop=True).infer_objects()  # numbers in a column of objects
        for site, frame in whole.items()
        if len(frame)
    }
    total = sum(map(len, frames.values()))
    dropped = total - sum(map(len, complete_frames.values()))
    if not complete_frames:
        raise ValueError("no client has a row without missing values; expected at least one")
    if dropped:
        counts = sum(frame.isna().sum() for frame in frames.values())
        gaps = listed([f"{name} {int(n)}" for name, n in counts.items() if n])
        gone = [site for site in frames if site not in complete_frames]
        lost = f"; no row is left of {listed(gone)}" if gone else ""
        warn_user(f"{dropped} of {total} rows are dropped, as values are missing ({gaps}){lost}")
    return complete_frames


def kind_of(column: pd.Series) -> str:
    """Return what a column holds: numbers or text."""
    return "numbers" if is_numeric_dtype(column) and not _ordered(column) else "text"


def _ordered(column: pd.Series) -> bool:
    return isinstance(column.dtype, pd.CategoricalDtype) and bool(column.dtype.ordered)


def _levels(columns: Sequence[pd.Series]) -> tuple[Level, ...]:
    """Return the union of the levels, in their declared order if there is one, else sorted."""
    first = columns[0]
    if _ordered(first):
        if any(
            not _ordered(c) or list(c.cat.categories) != list(first.cat.categories) for c in columns
        ):
            raise ValueError(
                f"column {first.name} is ordered in different ways; expected the same categories "
                "at all clients"
            )
        return tuple(first.cat.categories.tolist())
    seen = {level for column in columns for level in column.unique().tolist()}
    declared = {order for column in columns if (order := _declared_order(column))}
    if not declared:
        return tuple(sorted(seen))
    (order, *others) = declared
    if others or not seen <= set(order) or any(_contradicts(column, order) for column in columns):
        raise ValueError(
            f"categories of column {first.name} are declared in different ways; expected the same "
            "categories at all clients"
        )
    return tuple(level for level in order if level in seen)


def _declared_order(column: pd.Series) -> tuple[Level, ...]:
    """Return the categories of a column in an order that is not that of the alphabet, or ()."""
    is_categorical = isinstance(column.dtype, pd.CategoricalDtype)
    if not is_categorical or column.cat.categories.is_monotonic_increasing:
        return ()
    return tuple(column.cat.categories.tolist())


def _contradicts(column: pd.Series, order: Sequence[Level]) -> bool:
    """Return whether categories of a column are in another order than the one declared."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return False
    places = [order.index(level) for level in column.cat.categories if level in order]
    return places != sorted(places)


def _typed(column: pd.Series, levels: tuple[Level, ...] | None) -> pd.Series:
    """Return a column with the type that all clients use."""
    if _ordered(column):
        return column
    if levels is not None and list(levels) != sorted(levels):
        return pd.Series(pd.Categorical(column.tolist(), levels, ordered=True))  # as declared
    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(column.cat.categories.dtype)
    if is_bool_dtype(column) or levels is not None:
        return column
    return column.astype(np.float64)


def mean_of(clients: Clients, values: Callable[[pd.DataFrame], Any]) -> tuple[Any, Any]:
    """Return mean and mean square deviation of the clients' values, by two sums.

    Args:
        clients: the clients.
        values: function of a table that returns an array [N, ...].
    """
    arrays = clients.report(lambda frame: np.asarray(values(frame), dtype=np.float64))
    count = sum(map(len, arrays))
    mean = total([v.sum(0) for v in arrays]) / count
    return mean, total([((v - mean) ** 2).sum(0) for v in arrays]) / count


def total(parts: Sequence[Any]) -> Any:
    """Return the sum of numbers or arrays of the clients, without rounding errors of the order."""
    arrays = np.stack([np.asarray(part, dtype=np.float64) for part in parts])
    flat = arrays.reshape(len(arrays), -1)
    sums = [math.fsum(column) for column in flat.T]
    return np.array(sums).reshape(arrays.shape[1:])[()]


def quantiles(arrays: Sequence[Any], parts: Sequence[float]) -> list[float]:
    """Return quantiles of all clients' values as numpy does, by counts of values up to a bound.

    Bounds are bisected until the counts determine the order statistics exactly: 64 exchanges.
    """
    sorted_ = [np.sort(np.asarray(v, dtype=np.float64)) for v in arrays]
    count = sum(map(len, sorted_))
    if not parts:
        return []
    places = [part * (count - 1) for part in parts]
    ranks = sorted({int(p) for p in places} | {min(int(p) + 1, count - 1) for p in places})
    statistics_by_rank = dict(zip(ranks, _order_statistics(sorted_, ranks), strict=True))
    answer = []
    for place in places:
        low, share = int(place), place - int(place)
        a, b = statistics_by_rank[low], statistics_by_rank[min(low + 1, count - 1)]
        answer.append(b - (b - a) * (1 - share) if share >= 0.5 else a + (b - a) * share)
    return answer


def _order_statistics(arrays: Sequence[Any], ranks: Sequence[int]) -> Any:
    """Return the values of given ranks, from 0, among the values of all clients."""
    low = np.full(len(ranks), _place(np.array([min(v[0] for v in arrays)]))[0])
    high = np.full(len(ranks), _place(np.array([max(v[-1] for v in arrays)]))[0])
    while bool((low < high).any()):
        middle = (low & high) + ((low ^ high) >> 1)
        bound = _value(middle)
        below = sum(np.searchsorted(v, bound, side="right") for v in arrays)
        enough = below > np.asarray(ranks)
        high, low = np.where(enough, middle, high), np.where(enough, low, middle + 1)
    return _value(low).tolist()


def _place(values: Any) -> Any:
    """Return integers in the order of floating-point numbers."""
    bits = (values + 0.0).view(np.int64)
    return np.where(bits < 0, np.int64(-(2**63)) - bits - 1, bits)


def _value(places: Any) -> Any:
    bits = np.where(places < 0, np.int64(-(2**63)) - places - 1, places)
    return bits.astype(np.int64).view(np.float64)


def tensor(values: Any) -> torch.Tensor:
    """Return an array as a tensor in double precision."""
    return torch.from_numpy(np.array(values, dtype=np.float64))
