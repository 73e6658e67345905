"""Preprocessing of table columns into features, from summaries of the clients' columns.

Every client reports a summary of each column of its training rows: counts of values and gaps,
mean, sum of squared deviations, or the categories; see `summarize_columns`. The sums of these equal
those of the pooled rows, and define a `Preprocessor`, which is stored with a run and applied to new
rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from math import exp, isfinite, isnan
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import check_name, checked, did_you_mean
from pyrofl.choices import Scaling
from pyrofl.data.tables.column_summary import (
    ColumnSummary,
    Numbers,
    category_codes,
    summarize_values,
)
from pyrofl.data.tables.columns import Column, Ints, number
from pyrofl.data.tables.data_quality import spelling_and_unit_warnings
from pyrofl.data.tables.row_checks import outlier_position
from pyrofl.data.tables.table_files import columns_of
from pyrofl.data.tables.wording import listed
from pyrofl.user_warnings import warn_user

UnseenCategoryPolicy = Literal["refuse", "zero"]
"""Treatment of categories without a training row: an error, or 0 in all features of the column."""

MISSING_FEATURE_NAME = "{} is missing"


@dataclass(frozen=True)
class ColumnPreprocessing:
    """Preprocessing of one table column: standardization, or a 0/1 feature for each category."""

    name: str
    center: float = 0.0
    scale: float = 1.0
    levels: tuple[str, ...] | None = None  # None: numbers
    filler: float | None = None  # replacement of a gap; None: gaps are errors
    marked: bool = False  # whether a 0/1 feature indicates the gaps

    @property
    def is_standardized(self) -> bool:
        """Whether the column is numeric and is centered or scaled."""
        return self.levels is None and (self.center, self.scale) != (0.0, 1.0)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features computed from the column."""
        of = (self.name,) if self.levels is None else (f"{self.name}={w}" for w in self.levels)
        return (*of, *((MISSING_FEATURE_NAME.format(self.name),) if self.marked else ()))

    def encode(self, values: Numbers, levels: Sequence[str] | None) -> list[Numbers]:
        """Compute a column's features, [N] each, from its numbers or category codes."""
        gaps = np.isnan(values)
        if self.levels is None:
            full = values if self.filler is None else np.where(gaps, self.filler, values)
            encoded = [(full - self.center) / self.scale]
        else:
            place = {word: code for code, word in enumerate(levels or ())}
            encoded = [1.0 * (values == place.get(word, -1)) for word in self.levels]
        return [*encoded, 1.0 * gaps] if self.marked else encoded


@dataclass(frozen=True)
class Preprocessor:
    """Preprocessing of the columns of a table into the features of x."""

    columns: tuple[ColumnPreprocessing, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # column -> why it is no feature

    @classmethod
    def of_columns(cls, names: Iterable[str]) -> Preprocessor:
        """Return the preprocessor that leaves columns of numbers unchanged."""
        return cls(tuple(map(ColumnPreprocessing, names)))

    @classmethod
    def of(
        cls,
        told: Iterable[Mapping[str, ColumnSummary]],
        scaling: Scaling = "standardize",
        *,
        fill: bool = False,
        plain: Sequence[str] = (),
        names: Sequence[str] = (),
        warns: bool = True,
    ) -> Preprocessor:
        """Build the preprocessor from the clients' column summaries (`summarize_columns`).

        A warning names each column in which clients seem to use different units, or different
        spellings of one category.

        Args:
            told: of each client, column -> summary; the same columns for all clients.
            scaling: "standardize", or "none" to keep numbers unchanged.
            fill: replace missing numbers by the mean, and add a 0/1 indicator feature
                (for models that draw such values); otherwise gaps are errors.
            plain: columns of numbers that are never scaled.
            names: names of the clients, for messages; default "client 0", "client 1"...
            warns: whether to compare the clients' units and spellings.

        Raises:
            ValueError: if there is no client, or clients differ in columns or in their kinds.
        """
        clients = list(told)
        names = names or [f"client {j}" for j in range(len(clients))]
        _check_same_columns(clients, names)
        for text in spelling_and_unit_warnings(clients, names) if warns else ():
            warn_user(text)
        whole = {name: reduce(add, (c[name] for c in clients)) for name in clients[0]}
        columns, left_out = list[ColumnPreprocessing](), dict[str, str]()
        for name, column in whole.items():
            gaps: dict[str, Any] = {}
            if fill:
                gaps = {"filler": column.mean, "marked": column.gaps > 0}
            if column.underflows:
                raise ValueError(
                    f"column {name} holds numbers of about {exp(column.logs.mean):.1g}, whose "
                    "squares are 0; expected numbers above 1e-100: use another unit"
                )
            if not column.count and name not in plain:
                left_out[name] = "no training row has a value"
            elif column.levels is not None:
                columns.append(
                    ColumnPreprocessing(name, levels=_sort_categories(name, column.levels), **gaps)
                )
            elif name in plain:
                columns.append(ColumnPreprocessing(name))
            elif scaling == "none":
                columns.append(ColumnPreprocessing(name, **gaps))
            elif not column.varies and not (fill and column.gaps):
                left_out[name] = f"all training rows have {column.mean:g}"
            else:
                columns.append(ColumnPreprocessing(name, *column.moments, **gaps))
        if not columns:
            why = listed([f"{name} ({why})" for name, why in left_out.items()])
            raise ValueError(f"no column is left: {why}; expected one that differs between rows")
        return cls(tuple(columns), left_out)

    @property
    def plain(self) -> bool:
        """Whether preprocessing leaves all columns unchanged."""
        return all(column == ColumnPreprocessing(column.name) for column in self.columns)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the computed features: column names, "COLUMN=LEVEL" and "COLUMN is missing"."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def center(self) -> Tensor:
        """Center subtracted from each feature, in the unit of its column: float64 [F]."""
        centers = [c.center if is_owner else 0.0 for c, is_owner in self._source_columns]
        return torch.tensor(centers, dtype=torch.float64)

    @property
    def scale(self) -> Tensor:
        """Scale by which each feature is divided, in the unit of its column: float64 [F]."""
        scales = [c.scale if is_owner else 1.0 for c, is_owner in self._source_columns]
        return torch.tensor(scales, dtype=torch.float64)

    @property
    def _source_columns(self) -> list[tuple[ColumnPreprocessing, bool]]:
        """Source column of each feature, and whether the feature holds that column's numbers."""
        return [(c, name == c.name) for c in self.columns for name in c.features]

    @checked
    def apply(self, table: Any, *, unseen: UnseenCategoryPolicy = "refuse") -> Tensor:
        """Compute the features of a table's rows: float32 [N, F].

        Args:
            table: path of a file, data frame, or dict of columns, in any order; additional columns
                are ignored.
            unseen: "refuse" raises an error for categories without a training row; "zero" sets
                their features to 0.

        Raises:
            ValueError: names the column, the place and the value that is invalid.
        """
        columns = columns_of(table)
        raw = [self._raw(column, columns, unseen) for column in self.columns]
        return self.encode(np.stack(raw, 1), {c.name: c.levels for c in self.columns})

    def encode(
        self,
        raw: Numbers,
        levels: Mapping[str, Sequence[str] | None],
        names: Sequence[str] | None = None,
    ) -> Tensor:
        """Compute features [N, F] from unprocessed columns [N, C] of numbers and category codes."""
        names = [column.name for column in self.columns] if names is None else list(names)
        places = (raw[:, names.index(column.name)] for column in self.columns)
        columns = [
            feature
            for column, values in zip(self.columns, places, strict=True)
            for feature in column.encode(values, levels.get(column.name))
        ]
        return torch.from_numpy(np.stack(columns, 1).astype(np.float32))

    @staticmethod
    def place_of(table: Any, row: int) -> str:
        """Return the place of a row of a table, such as "line 3" of a file."""
        place: str = next(iter(columns_of(table).values())).places[row]
        return place

    def find_outlier(self, features: Tensor) -> tuple[int, ColumnPreprocessing, float] | None:
        """Return the value farthest from its training mean if it is an outlier, else None.

        Args:
            features: features of new rows, [N, F].

        Returns:
            Its row, its column and its distance in standard deviations; None if there is none.
        """
        at = [
            i
            for i, (c, is_owner) in enumerate(self._source_columns)
            if is_owner and c.is_standardized
        ]
        if not at or not len(features):
            return None
        cell = outlier_position(features[:, at].nan_to_num(0.0).numpy())
        if not cell:
            return None
        row, i = cell
        return row, self._source_columns[at[i]][0], float(features[row, at[i]])

    def on_raw_scale(self, weight: Any, bias: Any = 0.0) -> tuple[Any, Any]:
        """Convert coefficients and intercept of a linear model to the columns' original units.

        bias + weight · x equals raw bias + raw weight · columns, with gaps as the means.

        Args:
            weight: coefficients of a linear model, tensor or array [..., F], such as draws of them.
            bias: intercepts [...], or a number.

        Raises:
            ValueError: if the last axis of weight is not one of the F features.
        """
        center: Any = self.center
        scale: Any = self.scale
        if torch.is_tensor(weight):
            center, scale = (v.to(weight.device, weight.dtype) for v in (center, scale))
        else:
            weight, center, scale = np.asarray(weight), center.numpy(), scale.numpy()
        if not weight.shape or weight.shape[-1] != len(self.features):
            raise ValueError(
                f"weight has shape {list(weight.shape)}; expected {len(self.features)} features "
                "along its last axis"
            )
        raw = weight / scale
        return raw, bias - (raw * center).sum(-1)

    def to_json(self) -> str:
        """Return the preprocessor as JSON text, which `from_json` restores exactly."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Preprocessor:
        """Restore the preprocessor from the JSON text that `to_json` returned.

        Raises:
            ValueError: if the text is not such a preprocessor.
        """
        try:
            parsed = json.loads(text)
            columns = tuple(_column_from_json(column) for column in parsed["columns"])
            return cls(columns, {str(n): str(why) for n, why in parsed["left_out"].items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"no preparation ({reason}); expected what `to_json` wrote") from error

    def summary(self) -> str:
        """Return a one-line summary of the preprocessing of the columns."""
        moved = [c.name for c in self.columns if c.is_standardized]
        coded = [f"{c.name} ({len(c.levels)})" for c in self.columns if c.levels is not None]
        marked = [c.name for c in self.columns if c.marked]
        parts = [f"standardized by sums over clients: {listed(moved)}"] if moved else []
        parts += [f"categories: {listed(coded)}"] if coded else []
        parts += [f"gaps filled and marked: {listed(marked)}"] if marked else []
        parts += [f"left out: {n} ({why})" for n, why in self.left_out.items()]
        return "; ".join(parts)

    def _raw(
        self, how: ColumnPreprocessing, columns: Mapping[str, Column], unseen: UnseenCategoryPolicy
    ) -> Numbers:
        """Return a table column's numbers or category codes [N], before preprocessing."""
        if how.name not in columns:
            check_name(how.name, list(columns), f"column in {next(iter(columns.values())).file}:")
        column = columns[how.name]
        column.refuse_clash("correct the file")
        if column.gaps.any() and how.filler is None:
            raise ValueError(
                f"{column.label} lacks a value in {column.places[column.gaps.argmax()]}; expected "
                "one, as training did not fill gaps (missing='impute' does)"
            )
        if how.levels is None:
            column.refuse_odd("fill in a number")
            return column.numbers
        codes = category_codes(column, how.levels)
        if unseen == "refuse" and (codes == -1).any():
            raise ValueError(
                f"{column.first(codes == -1)}, which no client had; expected one of "
                f"{listed(how.levels)}, or unseen='zero'"
            )
        return codes


@dataclass(frozen=True, eq=False)
class PreprocessingPlan:
    """Options for preprocessing table columns [N, C] of numbers and category codes."""

    columns: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of columns of codes
    scaling: Scaling = "standardize"
    fill: bool = False
    plain: tuple[str, ...] = ()  # columns that are never scaled

    def follow(
        self, raw: Tensor, train: Sequence[Ints], names: Sequence[str] = ()
    ) -> tuple[Tensor, Preprocessor, dict[str, str]]:
        """Fit the preprocessing of columns to the training rows of all clients; transform all rows.

        Also returns the preprocessor and the categories without a training row, which are 0 in all
        features of their column.
        """
        if list(raw.shape[1:]) != [len(self.columns)]:
            raise ValueError(
                f"x has shape {list(raw.shape)}; expected [N, {len(self.columns)}], as the columns "
                f"{listed(self.columns)} are to be prepared (scaling='none' leaves them)"
            )
        values = raw.double().numpy()
        summaries = [self._summarize_columns(values[rows]) for rows in train]
        options: Any = {"fill": self.fill, "plain": self.plain, "names": names}
        preprocessor = Preprocessor.of(summaries, self.scaling, warns=False, **options)
        return (
            preprocessor.encode(values, self.levels, self.columns),
            preprocessor,
            self._unseen_categories(values, preprocessor),
        )

    def _summarize_columns(self, rows: Numbers) -> dict[str, ColumnSummary]:
        return {
            name: summarize_values(values, self.levels.get(name))
            for name, values in zip(self.columns, rows.T, strict=True)
        }

    def _unseen_categories(self, values: Numbers, preprocessor: Preprocessor) -> dict[str, str]:
        """Return each column's categories that occur in no training row, with row counts."""
        levels_by_name = {column.name: column.levels for column in preprocessor.columns}
        unseen = {}
        for name, codes in zip(self.columns, values.T, strict=True):
            every, seen = self.levels.get(name, ()), levels_by_name.get(name) or ()
            if new := [code for code, word in enumerate(every) if word not in seen and seen]:
                rows = np.count_nonzero(np.isin(codes, new))
                unseen[name] = f"{listed([every[code] for code in new], 3)} in {rows} rows"
        return unseen


def _sort_categories(name: str, levels: Sequence[str]) -> tuple[str, ...]:
    """Sort categories, numbers first; raise ValueError if a number is written in two ways."""
    ways: dict[float, str] = {}
    for word in levels:
        value = number(word)
        if not isnan(value) and ways.setdefault(value, word) != word:
            message = f"column {name} has categories {ways[value]!r} and {word!r}"
            raise ValueError(f"{message}; expected one spelling of each category")
    texts = set(levels) - set(ways.values())
    return (*(ways[value] for value in sorted(ways)), *sorted(texts))


def _check_same_columns(
    clients: Sequence[Mapping[str, ColumnSummary]], names: Sequence[str]
) -> None:
    if not clients:
        raise ValueError("there is no column summary; expected those of at least one client")
    first = clients[0]
    for client, sums in zip(names, clients, strict=True):
        for name in dict.fromkeys((*first, *sums)):
            if name not in first or name not in sums:
                has, lacks = (client, names[0]) if name in sums else (names[0], client)
                raise ValueError(
                    f"column {name} is missing at {lacks}, and {has} has it; expected the same "
                    f"columns for all clients{did_you_mean(name, sums if has != client else first)}"
                )
            words, others = sums[name].levels, first[name].levels
            if (words is None) != (others is None):
                text, numbers = (client, names[0]) if others is None else (names[0], client)
                raise ValueError(
                    f"column {name} holds numbers at {numbers}, and categories such as "
                    f"{listed(words or others or (), 3)} at {text}; expected one kind"
                )


def _column_from_json(column: Mapping[str, Any]) -> ColumnPreprocessing:
    """Restore the preprocessing of one column from its JSON values, and validate it."""
    column_of_json = ColumnPreprocessing(**column)
    if column_of_json.levels is not None:
        column_of_json = ColumnPreprocessing(
            **{**column, "levels": tuple(map(str, column_of_json.levels))}
        )
    numbers = (
        column_of_json.center,
        column_of_json.scale,
        0.0 if column_of_json.filler is None else column_of_json.filler,
    )
    if (
        not isinstance(column_of_json.name, str)
        or not all(map(isfinite, numbers))
        or column_of_json.scale <= 0
    ):
        raise ValueError(f"{column} is no column")
    return column_of_json
