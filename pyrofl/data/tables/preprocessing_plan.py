"""What is to become of the raw columns of a data set, once it is known who trains on which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pyrofl.data.tables.column_summary import ColumnSummary, Numbers, told_of
from pyrofl.data.tables.preprocessor import Prepare, Preprocessor
from pyrofl.data.tables.wording import listed

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PreprocessingPlan:
    """How the columns of x [N, C] become features: numbers, codes of `levels`, NaN for gaps."""

    columns: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of columns of codes
    prepare: Prepare = "standardise"
    fill: bool = False
    plain: tuple[str, ...] = ()  # columns that are left as they are

    def follow(
        self, raw: Tensor, train: Sequence[Ints], names: Sequence[str] = ()
    ) -> tuple[Tensor, Preprocessor, dict[str, str]]:
        """Return features of all rows by what the training rows of each client tell.

        Also returns which categories none of them has: they are 0 in all features of their column.
        """
        if list(raw.shape[1:]) != [len(self.columns)]:
            raise ValueError(
                f"x has shape {list(raw.shape)}; expected [N, {len(self.columns)}], as the columns "
                f"{listed(self.columns)} are to be prepared (prepare='none' leaves them)"
            )
        values = raw.double().numpy()
        told = [self._told(values[rows]) for rows in train]
        made = Preprocessor.of(told, self.prepare, fill=self.fill, plain=self.plain, names=names)
        return made.encode(values, self.levels, self.columns), made, self._unseen(values, made)

    def _told(self, rows: Numbers) -> dict[str, ColumnSummary]:
        return {
            name: told_of(values, self.levels.get(name))
            for name, values in zip(self.columns, rows.T, strict=True)
        }

    def _unseen(self, values: Numbers, made: Preprocessor) -> dict[str, str]:
        """Tell of each column the categories that no client trains on, and in how many rows."""
        known = {column.name: column.levels for column in made.columns}
        found = {}
        for name, codes in zip(self.columns, values.T, strict=True):
            every, seen = self.levels.get(name, ()), known.get(name) or ()
            if new := [code for code, word in enumerate(every) if word not in seen and seen]:
                rows = np.count_nonzero(np.isin(codes, new))
                found[name] = f"{listed([every[code] for code in new], 3)} in {rows} rows"
        return found
