"""Rewrites of phases that change no number, up to rounding, and save time.

They look at a method's programs, losses and optimisers, which are values where that is possible:
`Supervised`, `Guide`, `Elbo`, `Sgd`. What they do not know runs as it is written; so does a method
whose model is hidden in a plain function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pyrofl.data import Federation
from pyrofl.inference.fast.frozen_base import on_frozen_base
from pyrofl.inference.fast.row_space import with_few_rows
from pyrofl.inference.method import Method, Phase
from pyrofl.tensors import Tensors

Rewrite = Callable[[Method, Phase, Tensors, Federation], tuple[tuple[Phase, ...], float] | None]
"""(method, phase, local, data) -> phases that do the same, and up to how many rows of a client
they pay; or None.

Of local the names count, of data the shape of a row. Who else trains never counts: a client takes
the same way alone and beside others."""

REWRITES: tuple[Rewrite, ...] = (on_frozen_base, with_few_rows)


class Ways(NamedTuple):
    """Two ways to do what a phase says."""

    written: tuple[Phase, ...]
    rewritten: tuple[Phase, ...]
    most: float  # rows of a client for which the second takes less time

    def of(self, rows: int) -> tuple[Phase, ...]:
        """Return the phases that take the least time for a client with so many rows."""
        return self.rewritten if rows <= self.most else self.written


class Known(threading.local):
    """The ways that a thread has found, by all that they depend on."""

    def __init__(self) -> None:
        """Begin with none."""
        self.found: dict[object, tuple[object, Ways]] = {}


KNOWN = Known()
KEPT = 64  # of them


def ways(method: Method, phase: Phase, local: Tensors, data: Federation) -> Ways:
    """Return the ways to do what a phase says; see `Rewrite`."""
    key = id(method), id(phase), tuple(local), data.x.shape[1:], data.x.dtype, REWRITES
    if key not in KNOWN.found:
        found = (rewrite(method, phase, local, data) for rewrite in REWRITES)
        phases, most = next((one for one in found if one is not None), ((phase,), 0))
        while len(KNOWN.found) >= KEPT:
            KNOWN.found.pop(next(iter(KNOWN.found)))
        KNOWN.found[key] = (method, phase), Ways((phase,), phases, most)  # whose ids stay theirs
    return KNOWN.found[key][1]
