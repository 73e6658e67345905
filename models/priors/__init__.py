"""Priors on the parameters of a network.

Every `prior` of a method accepts one of two kinds; anything else is refused when it is built.

A `Prior` is the complete prior of every parameter: a Pyro distribution over the real numbers, which
each entry gets, `dist.Normal(0.0, 1.0)`; a family, of location 0 and scale 1, `dist.Laplace`; or a
function, `flat`, `fixed(dist.Normal, 0.0, 1.0)`, `by_name({"head.*": ..., "*": flat})` or
`learned_scales.learned()`, whose scale the server learns from all clients.

A `PriorFamily` is the family of a hierarchical prior, whose location and scale the method provides:
`dist.Normal`, `dist.Laplace`, `student_t(4)`, `mixture()`, `Horseshoe`, your own function (loc,
scale) -> distribution, or a distribution of location 0 and scale 1, `dist.StudentT(4.0)`. With
`by_name({"head.*": dist.Laplace, "*": dist.Normal})` layers have different families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor

from pyrofl.arguments import NotNegative, Positive, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.prior_conversion import (
    PriorFamily,
    as_families,
    as_family,
    as_prior,
)
from pyrofl.inference.definition.programs import (
    ByName,
    LocationScale,
    Prior,
    PriorFunction,
    Proximal,
    around,
    as_event,
    flat,
)
from pyrofl.models.priors.horseshoe import Horseshoe
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

__all__ = [
    "Horseshoe",
    "LocationScale",
    "Prior",
    "PriorFamily",
    "PriorFunction",
    "around",
    "as_event",
    "as_families",
    "as_family",
    "as_prior",
    "by_name",
    "fixed",
    "flat",
    "mixture",
    "proximal",
    "student_t",
]


@rebuildable
@checked
def fixed(
    family: PriorFamily = dist.Normal, loc: float = 0.0, scale: Positive = 1.0
) -> PriorFunction:
    """Return a prior with fixed location and scale, the same for every network parameter."""
    distribution = as_family(family, "family")

    def prior(
        name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        center = batch.size.new_full(shape, loc)
        return as_event(distribution(center, torch.full_like(center, scale)), len(shape))

    return prior


@rebuildable
@checked
def proximal(
    strength: NotNegative, family: PriorFamily = dist.Normal, loc: str = "w"
) -> PriorFunction:
    """Return a prior centered at the received parameters, with scale (strength n_j)^-1/2.

    n_j is the client's number of rows.

    On the scale of a mean over rows a normal family is FedProx's strength / 2 ||w - w_received||^2.

    Args:
        strength: the papers' mu; 0 is a flat prior.
        family: location-scale family, see `as_family`, or families by `by_name`.
        loc: role of the received center.
    """
    if isinstance(family, ByName):
        each = {p: proximal(strength, one, loc) for p, one in family.families.items()}
        return ByName(each, each)
    distribution = as_family(family)
    return Proximal(strength, distribution, loc) if strength else flat


@rebuildable
@checked
def student_t(df: Positive) -> LocationScale:
    """Return Student's t with `df` degrees of freedom as a location-scale family."""

    def family(loc: Tensor, scale: Tensor) -> TorchDistribution:
        fn: TorchDistribution = dist.StudentT(df, loc, scale)
        return fn

    return family


@rebuildable
def mixture(
    weights: Sequence[float] = (0.5, 0.5), scales: Sequence[float] = (1.0, 0.1)
) -> LocationScale:
    """Return a mixture of normals with a common center as a location-scale family.

    The default is a wide and a narrow one: most parameters small, some large (Blundell, Cornebise,
    Kavukcuoglu and Wierstra, "Weight Uncertainty in Neural Networks", ICML 2015, section 3.3).

    Args:
        weights: of the components, in any unit.
        scales: their standard deviations, in units of the family's scale.

    Raises:
        ValueError: if the lengths differ, or a number is not positive.
    """
    if len(weights) != len(scales) or not weights or min(*weights, *scales) <= 0:
        raise ValueError(
            f"weights are {list(weights)} and scales {list(scales)}; expected as many of both, all "
            "positive"
        )

    def family(loc: Tensor, scale: Tensor) -> TorchDistribution:
        """Return the mixture distribution with the given location and scale."""
        loc, scale = torch.broadcast_tensors(loc, scale)
        share = loc.new_tensor(weights).log().expand(*loc.shape, len(weights))
        width = scale[..., None] * scale.new_tensor(scales)  # [..., components]
        fn: TorchDistribution = dist.MixtureSameFamily(
            dist.Categorical(logits=share), dist.Normal(loc[..., None].expand_as(width), width)
        )
        return fn

    return family


@rebuildable
def by_name(priors: Mapping[str, Prior]) -> ByName:
    """Return a prior that depends on the parameter's name: the first matching pattern decides.

    Args:
        priors: patterns separated by spaces -> prior, such as
            {"*.bias": flat, "*": dist.Normal(0.0, 1.0)}; or, for hierarchical methods, -> family,
            such as {"head.*": dist.Laplace, "*": dist.Normal}.

    Raises:
        ValueError: if a prior is none; from a method's `build`, if a parameter matches no pattern,
            or a pattern decides for no parameter.
    """
    return ByName({patterns: as_prior(prior) for patterns, prior in priors.items()}, dict(priors))
