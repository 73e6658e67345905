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
"""(method, phase, local, data, rows of the longest client) -> phases that do the same, or None."""

REWRITES: tuple[Rewrite, ...] = (on_frozen_base, with_few_rows)


def rewritten(
    method: Method, phase: Phase, local: Tensors, data: Federation, longest: int
) -> tuple[Phase, ...]:
    """Return the phases that take the least time to do what a phase says.

    Args:
        method: gives model and guide.
        phase: as the paper has it.
        local: what clients hold, [C, ...]; its names count.
        data: the federation; the shape of a row counts.
        longest: rows of the longest client.
    """
    for rewrite in REWRITES:
        if (found := rewrite(method, phase, local, data, longest)) is not None:
            return found
    return (phase,)
