"""Cache of Pyro plates, which avoids creating them repeatedly."""

from __future__ import annotations

from contextlib import ContextDecorator
from functools import cached_property, lru_cache
from typing import Any, cast

import pyro
from pyro import poutine
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame

DRAWS_PLATE = "draws"  # the plate over Monte Carlo draws
ONCE = "once"  # key of a site: its distribution, where all draws come from one and the same


class KeptPlates(ContextDecorator):
    """Context in which Pyro plates are cached, since creating one costs more than entering it.

    Such a plate leaves no node of its own in a trace, which Pyro's own inference looks for.
    """

    depth = 0

    def __enter__(self) -> None:
        """Activate the cache of Pyro plates."""
        KeptPlates.depth += 1

    def __exit__(self, *_: object) -> None:
        """Deactivate the cache of Pyro plates."""
        KeptPlates.depth -= 1


class _WholePlate(pyro.plate):
    """Pyro plate without subsampling or scaling, which broadcasts values that lack its axis."""

    @cached_property
    def _frame(self) -> CondIndepStackFrame:
        return CondIndepStackFrame(self.name, self.dim, self.size, self.counter, self.size)

    def _process_message(self, msg: Any) -> None:
        msg["cond_indep_stack"] = (self._frame, *msg["cond_indep_stack"])
        shape, axis = getattr(msg["fn"], "batch_shape", ()), cast("int", self.dim)
        if not msg["done"] and (len(shape) < -axis or shape[axis] != self.size):
            if self.name == DRAWS_PLATE:
                msg[ONCE] = msg["fn"]
            BroadcastMessenger._pyro_sample(msg)


@lru_cache(maxsize=256)
def _kept(name: str, size: int, dim: int) -> pyro.plate:
    with poutine.block():  # of handlers of whoever happens to be the first
        return _WholePlate(name, size, dim=dim)


def plate(name: str, size: int, dim: int) -> pyro.plate:
    """Return a Pyro plate, from the cache if one is active."""
    return _kept(name, size, dim) if KeptPlates.depth else pyro.plate(name, size, dim=dim)
