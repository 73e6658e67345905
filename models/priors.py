"""Priors on the parameters of a network.

Two kinds. A `Family` (loc, scale) -> distribution gives the shape of a hierarchical prior, whose
centre and width the method supplies: `dist.Normal`, `dist.Laplace`, `student_t(4)`. A `Prior` is
all there is to say about one parameter: `flat`, `fixed(dist.Normal, 0.0, 1.0)`.
"""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.tensors import Tensors

Family = Callable[[Tensor, Tensor], TorchDistribution]

Prior = Callable[[str, Size, Tensors, Tensors, Batch], TorchDistribution]
"""(name, shape, received, local, batch) -> distribution with event shape `shape`."""


def flat(
    name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
) -> TorchDistribution:
    """Say nothing about the parameter: with a delta guide, maximum likelihood."""
    return dist.ImproperUniform(constraints.real, (), shape)


def fixed(family: Family = dist.Normal, loc: float = 0.0, scale: float = 1.0) -> Prior:
    """Give every parameter the same prior, whatever the server says.

    Raises:
        ValueError: if scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale of the prior is {scale}; expected a positive number")

    def prior(
        name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        centre = batch.size.new_full(shape, loc)
        return as_event(family(centre, torch.full_like(centre, scale)), len(shape))

    return prior


def proximal(strength: float, family: Family = dist.Normal, loc: str = "w") -> Prior:
    """Centre the prior at what came down: scale (strength n_j)^-1/2 for a client of n_j rows.

    On the scale of a mean over rows a normal family is FedProx's strength / 2 ||w - w_received||^2.

    Args:
        strength: the papers' mu; 0 is a flat prior.
        family: location-scale family.
        loc: role of the received centre.

    Raises:
        ValueError: if strength is negative.
    """
    if not strength >= 0:
        raise ValueError(f"strength of the proximal prior is {strength}; expected >= 0")
    if strength == 0:
        return flat

    def prior(
        name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        scale = (strength * batch.size).rsqrt()[:, None]
        return around(family, received[f"{loc}/{name}"], scale)

    return prior


def around(family: Family, centre: Tensor, scale: Tensor) -> TorchDistribution:
    """Centre a family at parameters [C, 1, *p] with one scale per client, [C, 1]."""
    axes = centre.dim() - scale.dim()
    scale = scale.reshape(*scale.shape, *(1 for _ in range(axes)))
    return as_event(family(centre, scale), axes)


def as_event(fn: TorchDistribution, axes: int) -> TorchDistribution:
    """Make one event of the last axes, so that no plate counts a parameter's entries as rows."""
    event: TorchDistribution = fn.to_event(axes)
    return event


def student_t(df: float) -> Family:
    """Return Student's t with `df` degrees of freedom as a location-scale family.

    Raises:
        ValueError: if df is not positive.
    """
    if not df > 0:
        raise ValueError(f"df of Student's t is {df}; expected a positive number")

    def family(loc: Tensor, scale: Tensor) -> TorchDistribution:
        fn: TorchDistribution = dist.StudentT(df, loc, scale)
        return fn

    return family
