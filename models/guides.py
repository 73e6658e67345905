"""Guides: families of posteriors over a client's parameters, under the client plate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from torch import Size
from torch.nn.functional import softplus

from pyrofl.data import Batch
from pyrofl.inference.elbo import Program
from pyrofl.tensors import Tensors, under

Moments = Callable[[Tensors, Tensors, Batch], tuple[Tensors, Tensors]]
"""(received, local, batch), tensors [C, *p] -> mean and variance of every site, [C, *p]."""


@dataclass(frozen=True)
class Guide:
    """A family of posteriors q(w; local).

    Attributes:
        program: the Pyro guide.
        start: values [*p] or [C, *p] that the sites are centred at -> local parameters.
        moments: mean and variance of every site, for closed forms.
        names: patterns of its local parameters.
        random: whether it has any spread; a guide without needs no Monte Carlo draws.
    """

    program: Program
    start: Callable[[Tensors], Tensors]
    moments: Moments
    names: str
    random: bool = True


Family = Callable[..., Guide]
"""(shapes, scale=, loc=, spread=) -> Guide; `mean_field` and `delta` are two."""


def delta(
    shapes: Mapping[str, Size], *, scale: float = 0.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Put all mass on one point, local["mu/..."]: maximum likelihood, or MAP under a prior.

    Args:
        shapes: of the sites, by name.
        scale: ignored, as is `spread`; there so that guides can be exchanged.
        loc: role of the points, [C, *p].
        spread: ignored.
    """

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Delta(local[f"{loc}/{n}"], event_dim=len(shape)))

    def start(centre: Tensors) -> Tensors:
        return under(loc, {n: centre[n] for n in shapes})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: torch.zeros_like(v) for n, v in mean.items()}

    return Guide(program, start, moments, f"{loc}/*", random=False)


def mean_field(
    shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let parameters be independent normals, N(mu, softplus(pi)^2).

    Args:
        shapes: of the sites, by name.
        scale: standard deviation at the start.
        loc: role of the means, [C, *p].
        spread: role of the standard deviations before softplus, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """
    first = inverse_softplus(scale)

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                sd = softplus(local[f"{spread}/{n}"])
                pyro.sample(n, dist.Normal(local[f"{loc}/{n}"], sd).to_event(len(shape)))

    def start(centre: Tensors) -> Tensors:
        means = {n: centre[n] for n in shapes}
        return under(loc, means) | under(
            spread, {n: torch.full_like(v, first) for n, v in means.items()}
        )

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: softplus(local[f"{spread}/{n}"]).square() for n in shapes}

    return Guide(program, start, moments, f"{loc}/* {spread}/*")


def inverse_softplus(value: float) -> float:
    """Return the number whose softplus is `value`.

    Raises:
        ValueError: if value is not positive.

    >>> round(inverse_softplus(1.0), 6)
    0.541325
    """
    if not value > 0:
        raise ValueError(f"scale of the guide is {value}; expected a positive number")
    return value + math.log(-math.expm1(-value))
