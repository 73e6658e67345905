"""Normal priors of a layer that is in the space of rows: distances by coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.programs import Prior, Spherical
from pyrofl.tensors import Tensors


@dataclass(frozen=True)
class InRowsPrior:
    """Priors of a model whose first layer is in the space of rows."""

    priors: Prior
    name: str  # of the layer's weight
    outputs: Tensor  # [C, k n, out]
    inner: Tensor  # [C, k, k]
    crossed: tuple[tuple[int, int], ...]  # entries of it that count

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior of a parameter."""
        prior = self.priors(name, shape, received, local, batch)
        if name != self.name or not isinstance(prior, Spherical):
            return prior
        known = self.outputs, self.inner, self.crossed
        return SphericalInRows(prior.base_dist, shape.numel(), known)


class SphericalInRows(Spherical):
    """A normal prior of one scale, of coefficients."""

    def __init__(self, fn: TorchDistribution, entries: int, known: tuple[Any, ...]) -> None:
        """Put it on coefficients of weights with so many entries; see `HalfSquaresInRows`."""
        super().__init__(fn, 2)
        self.known, self.numbers = known, entries

    def distance(self, value: Tensor) -> Tensor:
        """Return the log density of the centre less that of weights: half the squares, in scales.

        A centre that has not moved along rows is given by its a alone.
        """
        value, centre = value.squeeze(1), self.base_dist.loc.squeeze(1)
        if centre.shape[1] == value.shape[1]:
            value, centre = value - centre, None
        found: Tensor = HalfSquaresInRows.apply(value, centre, *self.known)
        return found[:, None] / self.scale.square()

    @property
    def entries(self) -> int:
        """Numbers in a weight."""
        return self.numbers


class HalfSquaresInRows(torch.autograd.Function):
    """Half the sum of squares of weights; its gradient is by a weight, as that of `RowProducts`."""

    @staticmethod
    def forward(
        ctx: Any,
        apart: Tensor,
        centre: Tensor | None,
        outputs: Tensor,
        inner: Tensor,
        crossed: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Return [C] of coefficients [C, 2 n + k, out], whose a are apart from those of a centre.

        Outputs are [C, k n, out], inner [C, k, k], of which the crossed entries count.
        """
        n = outputs.shape[1] // inner.shape[1]
        along = apart[:, 2 * n :] if centre is None else apart[:, 2 * n :] - centre
        ctx.save_for_backward(apart, along)
        found, own = dot(apart[:, :n], apart[:, n : 2 * n]), along[..., 0]
        for k in {i for i, _ in crossed}:
            found = found + 2 * own[:, k] * dot(apart[:, :n], outputs[:, k * n : k * n + n])
        for i, j in crossed:
            found = found + own[:, i] * own[:, j] * inner[:, i, j]
        return found / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradient by the coefficients."""
        (apart, along), scale = ctx.saved_tensors, grads[0][:, None, None]
        found = scale * apart
        found[:, apart.shape[1] - along.shape[1] :] = scale * along
        return found, None, None, None, None


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner products of clients' tensors, [C]; ten times as fast as a product's."""
    return (one * other).flatten(1).sum(1)
