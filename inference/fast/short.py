"""An ELBO of a model that runs something shorter in place of its network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.elbo import Elbo
from pyrofl.inference.programs import Program, Supervised
from pyrofl.nets import Forward
from pyrofl.tensors import Tensors

Way = Callable[[Tensors, Batch], tuple[Forward, Tensors]]
"""(local, batch) -> what runs instead of the network, and local without what only that reads."""


@dataclass(frozen=True)
class ShortElbo:
    """The loss of a rewritten phase. A value, as `Elbo` is."""

    loss: Elbo
    way: Way

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return one value per client, [C]."""
        run, rest = self.way(local, batch)
        return self.loss(
            replace(cast("Supervised", model), forward=run), guide, received, rest, batch
        )
