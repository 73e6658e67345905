"""Normal priors of a layer whose weights are represented by coefficients of data rows."""

from __future__ import annotations

from dataclasses import dataclass

from pyro.distributions import TorchDistribution
from torch import Size, Tensor

from pyrofl.inference.definition.spherical import Spherical


@dataclass
class InRowsPrior:
    """Priors of a model whose first layer is represented by coefficients of data rows.

    Attributes:
        name: name of the layer's weight.
        shape: shape of the layer's weight.
        inner: <A, A>, [C, k, k].
        crossed: pairs of A with a possible distance from the center along them.
        center: center of the weight's prior if that has one, [C, k or 2 n + k, out]; set where the
            weight is drawn, and read where the layer's outputs are computed.
        half: half the squared distance from it, [C]; computed with the outputs by one function, so
            that gradients of both are added in one tensor.
        is_directed: whether the last A is a constant direction of the gradient.
        along: zeros [C] with that direction as gradient by the weight; computed like `half`.
    """

    name: str
    shape: Size
    inner: Tensor
    crossed: tuple[tuple[int, int], ...]
    center: Tensor | None = None
    half: Tensor | None = None
    is_directed: bool = False
    along: Tensor | None = None

    def __call__(self, name: str, prior: TorchDistribution) -> TorchDistribution:
        """Return the distribution of a site, given that of the model."""
        if name != self.name or not isinstance(prior, Spherical):
            return prior
        self.center = prior.base_dist.loc.squeeze(1)
        return SphericalInRows(prior.base_dist, self.shape.numel(), self)


class SphericalInRows(Spherical):
    """Normal prior, with one scale per client, of weights represented by coefficients of rows."""

    def __init__(self, fn: TorchDistribution, entries: int, row_prior: InRowsPrior) -> None:
        super().__init__(fn, 2)
        self.row_prior, self.numbers = row_prior, entries

    def distance(self, value: Tensor) -> Tensor:
        """Return half the squared distance of the weights from the center, divided by the variance.

        It is the log density of the center minus that of the weights. The network
        has been run on the value before.
        """
        assert self.row_prior.half is not None
        return self.row_prior.half[:, None] / self.scale.square()

    @property
    def entries(self) -> int:
        """Number of entries of the layer's weight, not of the coefficients that represent it."""
        return self.numbers


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the inner product of two tensors [C, ...] for each client, [C].

    This is faster than a matrix product.
    """
    return (one * other).flatten(1).sum(1)
