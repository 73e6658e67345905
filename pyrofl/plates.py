"""Pyro plates that are made once."""

from __future__ import annotations

from contextlib import ContextDecorator
from functools import lru_cache

import pyro
from pyro import poutine


class KeptPlates(ContextDecorator):
    """Let batches enter plates that were made before; making one costs more than entering it.

    Such a plate leaves no node of its own in a trace, which Pyro's own inference looks for.
    """

    depth = 0

    def __enter__(self) -> None:
        """Begin."""
        KeptPlates.depth += 1

    def __exit__(self, *_: object) -> None:
        """End."""
        KeptPlates.depth -= 1


@lru_cache(maxsize=256)
def _kept(name: str, size: int, dim: int) -> pyro.plate:
    with poutine.block():  # of handlers of whoever happens to be the first
        return pyro.plate(name, size, dim=dim)


def plate(name: str, size: int, dim: int) -> pyro.plate:
    """Return a plate of Pyro."""
    return _kept(name, size, dim) if KeptPlates.depth else pyro.plate(name, size, dim=dim)
