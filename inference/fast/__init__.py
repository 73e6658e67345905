"""Rewrites of phases that change no number, up to rounding, and save time.

They look at a method's programs, losses and optimisers, which are values where that is possible:
`Supervised`, `Guide`, `Elbo`, `Sgd`. What they do not know runs as it is written; so does a method
whose model is hidden in a plain function.
"""

from __future__ import annotations

from collections.abc import Callable

from pyrofl.data import Federation
from pyrofl.inference.fast.frozen_base import on_frozen_base
from pyrofl.inference.fast.row_space import with_few_rows
from pyrofl.inference.method import Method, Phase
from pyrofl.tensors import Tensors

Rewrite = Callable[[Method, Phase, Tensors, Federation, int], tuple[Phase, ...] | None]
"""(method, phase, local, data, rows of the longest client) -> phases that do the same, or None.

Of local the names count, of data the shape of a row."""

REWRITES: tuple[Rewrite, ...] = (on_frozen_base, with_few_rows)


def rewritten(
    method: Method, phase: Phase, local: Tensors, data: Federation, longest: int
) -> tuple[Phase, ...]:
    """Return the phases that take the least time to do what a phase says; see `Rewrite`."""
    found = (rewrite(method, phase, local, data, longest) for rewrite in REWRITES)
    return next((phases for phases in found if phases is not None), (phase,))
