"""Losses whose model runs something shorter in place of its network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.losses import On, WithoutRows
from pyrofl.inference.method import Phase
from pyrofl.inference.programs import Loss, Program, Supervised
from pyrofl.tensors import Tensors

Way = Callable[[Supervised, Tensors, Tensors, Batch], tuple[Supervised, Tensors, Tensors]]
"""(model, received, local, batch) -> a model that takes it, and what that reads of the two."""


@dataclass(frozen=True)
class ShortElbo:
    """The loss of a rewritten phase. A value, as `Elbo` is."""

    loss: Loss
    way: Way

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return one value per client, [C]."""
        short, received, local = self.way(cast("Supervised", model), received, local, batch)
        return self.loss(short, guide, received, local, batch)


@dataclass(frozen=True)
class ShortPhase(Phase):
    """A phase on minibatches whose tensors hold a client's rows: it runs in groups by their number.

    Attributes:
        blind: whether no move looks at x, which is therefore not fetched: it is empty.
    """

    blind: bool = False


def shortened(loss: Loss, way: Way) -> Loss:
    """Let a loss take a way: with the programs and the rows that reach it."""
    if isinstance(loss, (On, WithoutRows)):
        return replace(loss, loss=shortened(loss.loss, way))
    return ShortElbo(loss, way)
