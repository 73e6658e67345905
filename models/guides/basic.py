"""Guides: families of posteriors over a client's parameters, under the client plate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Size
from torch.distributions.transforms import ExpTransform, SoftplusTransform, Transform

from pyrofl.data import Batch
from pyrofl.inference.programs import Guide
from pyrofl.tensors import Tensors, under

Family = Callable[..., Guide]
"""(shapes, scale=, loc=, spread=) -> Guide; such as `mean_field` and `delta`."""


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

    def start(centre: Tensors, sd: Tensors | None = None) -> Tensors:
        return under(loc, {n: centre[n] for n in shapes})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: torch.zeros_like(v) for n, v in mean.items()}

    return Guide(program, start, moments, f"{loc}/*", random=False, points=loc)


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
    return _normals(shapes, loc, spread, SoftplusTransform(), inverse_softplus(scale))


def log_mean_field(
    shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let parameters be independent normals, N(mu, exp(pi)^2).

    Args:
        shapes: of the sites, by name.
        scale: standard deviation at the start.
        loc: role of the means, [C, *p].
        spread: role of the logarithms of the standard deviations, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale of the guide is {scale}; expected a positive number")
    return _normals(shapes, loc, spread, ExpTransform(), math.log(scale))


def _normals(
    shapes: Mapping[str, Size], loc: str, spread: str, positive: Transform, first: float
) -> Guide:
    """Let parameters be independent normals, whose standard deviations `positive` maps to."""

    def width(local: Tensors) -> Tensors:
        return {n: positive(local[f"{spread}/{n}"]) for n in shapes}

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        sd = width(local)
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Normal(local[f"{loc}/{n}"], sd[n]).to_event(len(shape)))

    def start(centre: Tensors, sd: Tensors | None = None) -> Tensors:
        means = {n: centre[n] for n in shapes}
        if sd is None:
            raw = {n: torch.full_like(v, first) for n, v in means.items()}
        else:
            raw = {n: positive.inv(sd[n]) for n in shapes}
        return under(loc, means) | under(spread, raw)

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: sd.square() for n, sd in width(local).items()}

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
