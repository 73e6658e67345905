"""Phases as written, and equivalent ones that are faster for clients with few rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pyrofl.inference.definition.method import Phase


class Alternatives(NamedTuple):
    """Training phase as written, and an equivalent one that is faster for clients with few rows."""

    written: tuple[Phase, ...]
    rewritten: tuple[Phase, ...]
    most: float  # largest number of rows for which the second is faster

    def of(self, rows: int) -> tuple[Phase, ...]:
        """Return the version of the training phase that is faster for a client with `rows` rows."""
        return self.rewritten if rows <= self.most else self.written


@dataclass(frozen=True)
class ShortPhase(Phase):
    """Minibatch phase rewritten for clients with few rows, which are grouped by size.

    Attributes:
        blind: whether no update reads x, which is then not fetched, but empty.
    """

    blind: bool = False
