"""Basic guides: point estimates and independent normals for each client's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions.transforms import SoftplusTransform
from torch.nn.functional import softplus

from pyrofl.arguments import Positive, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.programs import Guide, as_event
from pyrofl.tensors import Tensors

Shapes = Mapping[str, Size]

Family = Callable[..., Guide]
"""(shapes, init_scale=, loc=, spread=) -> Guide, such as `mean_field` and `delta`.

shapes: of the sites, by name.
scale: standard deviation at the start.
loc: role of the local tensors [C, *p] that sites are centered at, such as "mu" for "mu/NAME".
spread: role of the other local tensors; [C, *p], unless the family documents otherwise.

What a family has no use for it ignores, so that any two can be exchanged.
"""


def delta(shapes: Shapes, *, init_scale: float = 0.0, loc: str = "mu", spread: str = "pi") -> Guide:
    """Return a point-mass (Delta) guide for maximum likelihood or MAP; see `Family`."""
    return sitewise(
        shapes,
        (loc,),
        lambda axes, point: dist.Delta(point, event_dim=axes),
        lambda point: (point, torch.zeros_like(point)),
        lambda center, sd=None: (center,),
        points=loc,
        random=False,
    )


@checked
def mean_field(
    shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a guide of independent normals N(loc, softplus(spread)^2); see `Family`."""
    inverse, first = SoftplusTransform().inv, inverse_softplus(init_scale)
    widths = (lambda _, s: softplus(s), lambda _, sd: inverse(sd))
    return normals(shapes, (loc, spread), first, *widths)


@checked
def log_mean_field(
    shapes: Shapes, *, init_scale: Positive = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a guide of independent normals N(loc, exp(spread)^2); see `Family`."""
    widths = (lambda _, s: s.exp(), lambda _, sd: sd.log())
    return normals(shapes, (loc, spread), math.log(init_scale), *widths)


def normals(
    shapes: Shapes,
    roles: tuple[str, str],
    first: float,
    width: Callable[[Tensor, Tensor], Tensor],
    inverse: Callable[[Tensor, Tensor], Tensor],
) -> Guide:
    """Return a guide of independent normals, given a function for their standard deviations."""

    def start(center: Tensor, sd: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return center, torch.full_like(center, first) if sd is None else inverse(center, sd)

    return sitewise(
        shapes,
        roles,
        lambda axes, mean, s: as_event(dist.Normal(mean, width(mean, s)), axes),
        lambda mean, s: (mean, width(mean, s).square()),
        start,
    )


def sitewise(
    shapes: Shapes,
    roles: tuple[str, ...],
    site: Callable[..., TorchDistribution],
    moments: Callable[..., tuple[Tensor, Tensor]],
    start: Callable[..., tuple[Tensor, ...]],
    points: str = "",
    random: bool = True,
    is_simplex: bool = False,
) -> Guide:
    """Return a guide with an independent distribution for each latent site.

    site: axes of p, parameters -> distribution; moments: parameters -> mean, variance; start:
    center, perhaps standard deviation -> parameters.
    """

    def own(local: Tensors, name: str) -> list[Tensor]:
        return [local[f"{role}/{name}"] for role in roles]

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample every latent site from its distribution, given the client's parameters."""
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, site(len(shape), *own(local, n)))

    def begin(center: Tensors, sd: Tensors | None = None) -> Tensors:
        first = {n: start(center[n], *([] if sd is None else [sd[n]])) for n in shapes}
        return {f"{role}/{n}": first[n][i] for i, role in enumerate(roles) for n in shapes}

    def both(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        site_moments = {n: moments(*own(local, n)) for n in shapes}
        return {n: v for n, (v, _) in site_moments.items()}, {
            n: v for n, (_, v) in site_moments.items()
        }

    names = " ".join(f"{role}/*" for role in roles)
    return Guide(program, begin, both, names, random, points, is_simplex)


@checked
def inverse_softplus(value: Positive) -> float:
    """Return the inverse of the softplus function at `value`.

    >>> round(inverse_softplus(1.0), 6)
    0.541325
    """
    return value + math.log(-math.expm1(-value))
