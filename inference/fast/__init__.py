"""The space of a client's rows, in which first layers of clients with few rows train faster.

It changes no number, up to rounding. It is found by looking at a method's programs, losses and
optimisers, which are values where that is possible: `Supervised`, `Guide`, `Elbo`, `Sgd`. Other
methods run as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pyrofl.data import Federation
from pyrofl.inference.fast.row_space import with_few_rows
from pyrofl.inference.method import Method, Phase
from pyrofl.tensors import Tensors

Rewrite = Callable[
    [Method, Phase, Tensors, Tensors, Federation], tuple[tuple[Phase, ...], float] | None
]
"""(method, phase, received, local, data) -> phases that do the same, and up to how many rows of a
client they pay; or None.

Of received and local the names count, of data the shape of a row. Which clients train never counts:
a client takes the same way alone and beside others."""

REWRITES: tuple[Rewrite, ...] = (with_few_rows,)


class Ways(NamedTuple):
    """Two ways to do what a phase says."""

    written: tuple[Phase, ...]
    rewritten: tuple[Phase, ...]
    most: float  # rows of a client for which the second takes less time

    def of(self, rows: int) -> tuple[Phase, ...]:
        """Return the phases that take the least time for a client with so many rows."""
        return self.rewritten if rows <= self.most else self.written


class Itself:
    """What is equal to nothing but itself, so that it can be found."""

    def __init__(self, it: object) -> None:
        """Keep it, or its id would be another's."""
        self.it = it

    def __eq__(self, other: object) -> bool:
        """Say whether it is the same thing."""
        return isinstance(other, Itself) and other.it is self.it

    def __hash__(self) -> int:
        """Go by what it is, not by what it holds."""
        return id(self.it)


KNOWN: dict[object, Ways] = {}
KEPT = 256  # of these, which serve from round to round


def ways(method: Method, phase: Phase, received: Tensors, local: Tensors, data: Federation) -> Ways:
    """Return the ways to do what a phase says; see `Rewrite`."""
    programs = Itself(method.model), Itself(method.guide)
    names = tuple(received), tuple(local)
    key = REWRITES, programs, Itself(phase), names, data.x.shape[1:], data.x.dtype
    if key not in KNOWN:
        found = (rewrite(method, phase, received, local, data) for rewrite in REWRITES)
        phases, most = next((one for one in found if one is not None), ((phase,), 0))
        if len(KNOWN) >= KEPT:
            KNOWN.pop(next(iter(KNOWN)), None)
        KNOWN[key] = Ways((phase,), phases, most)
    return KNOWN[key]
