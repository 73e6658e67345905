"""Tables of named columns, one for each client, before a formula makes features of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyrofl.data.tables.wording import listed, number_of
from pyrofl.extensions import find_extension
from pyrofl.user_warnings import warn_user

PLACES = ("line", "row")
"""Names of the index of a data frame with the places of its rows: lines of a file, or rows."""


def number_rows(frame: Any) -> Any:
    """Return a data frame with the places of its rows as index, named as one of `PLACES`.

    Rows without lines of a file are counted from 1. Places are kept when rows are left out.
    """
    from pandas import RangeIndex

    if frame.index.name in PLACES:
        return frame
    return frame.set_axis(RangeIndex(1, len(frame) + 1, name="row"))


def place_of(frame: Any, position: int) -> str:
    """Return the place of a row for errors: "line 5" of a file, or "row 4" of a table."""
    places = number_rows(frame).index
    return f"{places.name} {places[position]}"


class Tables:
    """Data frames of the clients, by name; a formula names the columns that a model uses.

    Examples:
        >>> import pandas as pd
        >>> bern = pd.DataFrame({"age": [50, 61], "died": [0, 1]})
        >>> Tables({"bern": bern, "basel": bern[:1]})
        Tables of 2 clients with 3 rows: age, died
    """

    def __init__(self, frames: Mapping[str, Any]) -> None:
        """Validate and store the data frames.

        Args:
            frames: name of the client -> data frame with a column for each variable.

        Raises:
            ValueError: if there is no client, a client has no data frame, no row or two columns
                of one name.

        Warns:
            UserWarning: if nearly all rows of a client are copies of each other, or clients have
                the same rows.
        """
        if not isinstance(frames, Mapping) or not frames:
            raise ValueError(
                f"frames is {'empty' if isinstance(frames, Mapping) else type(frames).__name__}; "
                "expected a non-empty dict: client -> data frame"
            )
        for name, frame in frames.items():
            if not hasattr(frame, "columns") or not hasattr(frame, "isna"):
                raise ValueError(
                    f"{name} has a {type(frame).__name__}; expected a data frame of pandas"
                )
            if not len(frame):
                raise ValueError(f"{name} has no row; expected at least one")
            names = [str(column) for column in frame.columns]
            if twice := [column for column, count in Counter(names).items() if count > 1]:
                raise ValueError(
                    f"{name} has two columns of one name, {listed(twice, 3)}; expected distinct "
                    "names"
                )
        self.frames = {str(name): frame for name, frame in frames.items()}
        if len(self.frames) < len(frames):
            names = [str(name) for name in frames]
            twice = [name for name, count in Counter(names).items() if count > 1]
            raise ValueError(
                f"two clients are called {listed(twice, 3)}; expected names that differ as text"
            )
        look = find_extension("checks of frames")
        for text in look(self.frames) if look else ():
            warn_user(text)

    def __repr__(self) -> str:
        """Return the numbers of clients and rows, and the names of the columns."""
        columns = dict.fromkeys(str(n) for frame in self.frames.values() for n in frame.columns)
        rows = sum(map(len, self.frames.values()))
        counts = f"{number_of(len(self.frames), 'client')} with {number_of(rows, 'row')}"
        return f"Tables of {counts}: {', '.join(columns)}"
