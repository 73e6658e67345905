"""Variational dropout: posteriors with multiplicative noise, their prior and their product.

    q(w)     = Normal(theta, alpha theta^2)            p = alpha / (1 + alpha) is the dropout rate
    p(w)     = Normal(0, gamma),  gamma = theta^2 (1 + alpha)
    KL(q, p) = 1/2 log(1 + 1 / alpha)                  per weight

The prior is hierarchical: gamma is the width that makes the divergence least, so that taking it
for a constant gives the right gradient (Liu, Wang, Nie, Jiang, Xie and Wen, "Variational Bayesian
Dropout With a Hierarchical Prior", CVPR 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.programs import Guide
from pyrofl.tensors import Tensors, under

Coordinates = Literal["logvar", "alpha"]

BOUND = 8.5  # of the logarithms, either way
TINY = 1e-12  # least theta^2 that counts


def log_variance(
    shapes: Mapping[str, Size],
    *,
    scale: float = math.exp(-BOUND / 2),
    loc: str = "mu",
    spread: str = "pi",
) -> Guide:
    """Let weights be independent normals, N(theta, exp(s)), as the authors' code does.

    s is cut off at -8.5 and 8.5, and has no gradient beyond.

    Args:
        shapes: of the sites, by name.
        scale: standard deviation at the start.
        loc: role of theta, [C, *p].
        spread: role of s, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """
    return _normals(shapes, scale, loc, spread, lambda theta, s: bounded(s).exp())


def log_alpha(
    shapes: Mapping[str, Size], *, scale: float = 0.4, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let weights be independent normals, N(theta, exp(s) theta^2), as the paper writes them.

    s = log alpha is cut off at -8.5 and 8.5. The noise shrinks with the weight, so theta has a
    gradient of its own from it.

    Args:
        shapes: of the sites, by name.
        scale: standard deviation at the start, as a share of theta: the root of alpha.
        loc: role of theta, [C, *p].
        spread: role of s, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """

    def variance(theta: Tensor, s: Tensor) -> Tensor:
        return bounded(s).exp() * theta.square().clamp(min=TINY)

    return _normals(shapes, scale, loc, spread, variance)


def _normals(
    shapes: Mapping[str, Size],
    scale: float,
    loc: str,
    spread: str,
    variance: Callable[[Tensor, Tensor], Tensor],
) -> Guide:
    """Let sites be independent normals whose variance is a function of mean and spread."""
    if not scale > 0:
        raise ValueError(f"scale of the guide is {scale}; expected a positive number")
    first = 2 * math.log(scale)

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: variance(v, local[f"{spread}/{n}"]) for n, v in mean.items()}

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        means, variances = moments(received, local, batch)
        with batch.clients():
            for n, mean in means.items():
                pyro.sample(n, normal(mean, variances[n], len(shapes[n])))

    def start(centre: Tensors) -> Tensors:
        means = {n: centre[n] for n in shapes}
        spreads = {n: v.new_full(v.shape, first) for n, v in means.items()}
        return under(loc, means) | under(spread, spreads)

    return Guide(program, start, moments, f"{loc}/* {spread}/*")


FAMILIES = {"logvar": log_variance, "alpha": log_alpha}


def normal(mean: Tensor, variance: Tensor, axes: int) -> TorchDistribution:
    """Return N(mean, variance) as one event of the last axes."""
    fn: TorchDistribution = dist.Normal(mean, variance.sqrt()).to_event(axes)
    return fn


def hierarchical(
    mean: Tensor, variance: Tensor, axes: int, coordinates: Coordinates
) -> TorchDistribution:
    """Return the prior N(0, gamma) that fits q = N(mean, variance) best.

    KL(q, p) is then 1/2 log(1 + mean^2 / variance) per weight. It does not depend on theta in the
    paper's coordinates (theta, alpha), and is kept from pulling at theta in the code's (theta, log
    variance): the centre is zero, but moves with theta.

    Args:
        mean: [C, 1, *p].
        variance: [C, 1, *p].
        axes: of the parameter p.
        coordinates: "alpha" if the variance follows theta.
    """
    gamma = (mean.square() + variance).detach()
    centre = mean.detach() * 0 if coordinates == "alpha" else mean - mean.detach()
    return normal(centre, gamma, axes)


def bounded(s: Tensor) -> Tensor:
    """Cut off at -8.5 and 8.5; a start right at a bound still has a gradient, on any torch."""
    inside = (s >= -BOUND) & (s <= BOUND)
    return torch.where(inside, s, s.detach().clamp(-BOUND, BOUND))


def dropout_rate(mean: Tensor, variance: Tensor) -> Tensor:
    """Return p = alpha / (1 + alpha) = variance / (mean^2 + variance), of any shape."""
    return variance / (mean.square() + variance + TINY)


def product(mean: Tensor, variance: Tensor, weight: Tensor) -> Tensor:
    """Return the mode of prod_m N(w; mean_m, variance_m)^weight_m: [*p].

    Args:
        mean: [M, *p].
        variance: [M, *p]; or what else the precisions are to be the inverse of.
        weight: [M], of the clients.
    """
    share = (weight / weight.sum()).reshape(-1, *(1 for _ in mean.shape[1:]))
    precision = share / (variance + 1e-10)
    return (precision * mean).sum(0) / precision.sum(0)
