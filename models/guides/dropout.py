"""Variational dropout guides, with multiplicative noise on the weights, and their priors.

    q(w)     = Normal(theta, alpha theta^2)            p = alpha / (1 + alpha) is the dropout rate
    p(w)     = Normal(0, gamma),  gamma = theta^2 (1 + alpha)
    KL(q, p) = 1/2 log(1 + 1 / alpha)                  per weight

The prior is hierarchical: gamma is the width that makes the divergence least, so that taking it
for a constant gives the right gradient (Liu, Wang, Nie, Jiang, Xie and Wen, "Variational Bayesian
Dropout With a Hierarchical Prior", CVPR 2019).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyrofl.arguments import Positive, checked
from pyrofl.inference.definition.programs import Guide, as_event
from pyrofl.models.guides.basic import Shapes, normals

Coordinates = Literal["logvar", "alpha"]

LOG_BOUND = 8.5  # of the logarithms, either way
MIN_SD = math.exp(-LOG_BOUND / 2)  # standard deviation
MIN_SQUARED_MEAN = 1e-12  # least theta^2 that counts


@checked
def log_variance(
    shapes: Shapes,
    *,
    init_scale: Positive = MIN_SD,
    loc: str = "mu",
    spread: str = "pi",
) -> Guide:
    """Return a guide of independent normals N(theta, exp(s)), as in MetaVD's code.

    theta has the role loc, s spread; see `guides.Family`. s is cut off at -8.5 and 8.5, and has no
    gradient beyond.
    """
    return normals(
        shapes,
        (loc, spread),
        2 * math.log(init_scale),
        lambda theta, s: (clamp_log(s) / 2).exp(),
        lambda theta, sd: 2 * sd.log(),
    )


@checked
def log_alpha(
    shapes: Shapes, *, init_scale: Positive = 0.4, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a guide of independent normals N(theta, exp(s) theta^2), as in MetaVD's paper.

    s = log alpha is cut off at -8.5 and 8.5; scale is the root of alpha at the start, a share of
    theta; else as `log_variance`. The noise shrinks with the weight, so theta has a gradient of its
    own from it.
    """
    return normals(
        shapes,
        (loc, spread),
        2 * math.log(init_scale),
        lambda theta, s: (clamp_log(s) / 2).exp() * theta.abs().clamp(min=MIN_SQUARED_MEAN**0.5),
        lambda theta, sd: 2 * (sd / theta.abs()).log(),
    )


DROPOUT_GUIDES = {"logvar": log_variance, "alpha": log_alpha}


def normal_event(mean: Tensor, variance: Tensor, event_dim: int) -> TorchDistribution:
    """Return a normal distribution with given mean and variance; its last axes form one event."""
    return as_event(dist.Normal(mean, variance.sqrt()), event_dim)


def hierarchical_prior(
    mean: Tensor, variance: Tensor, event_dim: int, coordinates: Coordinates
) -> TorchDistribution:
    """Return the prior N(0, gamma) with the smallest KL divergence from q = N(mean, variance).

    KL(q, p) is then 1/2 log(1 + mean^2 / variance) per weight, as in MetaVD's eq. 4. It
    does not depend on theta in the paper's coordinates (theta, alpha), and is kept from pulling at
    theta in the code's (theta, log variance): the center is zero, but moves with theta.

    Args:
        mean: [C, 1, *p], as is the variance.
        variance: of q.
        event_dim: number of axes of the parameter p.
        coordinates: "alpha" if the variance follows theta.
    """
    gamma = (mean.square() + variance).detach()
    center = mean.detach() * 0 if coordinates == "alpha" else mean - mean.detach()
    return normal_event(center, gamma, event_dim)


class HierarchicalKL(torch.autograd.Function):
    """Autograd function for KL(q, p) with `hierarchical_prior`: 1/2 log(1 + mean^2 / v).

    The mean has no gradient. Both directions are chains of operations in place, as an operation on
    many weights takes as long as its access to memory.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, event_dim: int) -> Tensor:
        """Compute the divergence of each event, which are the last axes."""
        ctx.save_for_backward(mean, variance)
        ctx.event_dim = event_dim
        ratio = mean.square().div_(variance).add_(1).log_()  # log1p takes five times as long
        return ratio.sum(tuple(range(-event_dim, 0))) / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, Tensor, None]:
        """Return the gradient by the variance, -mean^2 / (2 v (v + mean^2))."""
        (mean, variance), (grad,) = ctx.saved_tensors, grads
        scale = (-grad / 2).reshape(*grad.shape, *(1,) * ctx.event_dim)  # [C, 1, ...]
        square = mean.square()
        if torch.is_grad_enabled():  # second derivatives
            return None, scale * square / (variance * (variance + square)), None
        below = (square + variance).mul_(variance)
        return None, square.mul_(scale).div_(below), None


def clamp_log(s: Tensor) -> Tensor:
    """Clamp values to [-8.5, 8.5]; values exactly at a bound keep their gradient."""
    clamped: Tensor = ClampLog.apply(s)
    return clamped


class ClampLog(torch.autograd.Function):
    """Autograd function of `clamp_log`; torch's own gives values at a bound no gradient."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        """Clamp values."""
        ctx.save_for_backward(s)
        return s.clamp(-LOG_BOUND, LOG_BOUND)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """Return the gradient where nothing was cut off, by one pass over memory."""
        (s,) = ctx.saved_tensors
        beyond = math.nextafter(LOG_BOUND, math.inf)
        if s.dtype == torch.float32:
            beyond = LOG_BOUND * (1 + torch.finfo(s.dtype).eps)
        gradient: Tensor = torch.ops.aten.hardtanh_backward(grads[0], s, -beyond, beyond)
        return gradient


def dropout_rate(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the dropout rate p = alpha / (1 + alpha) = variance / (mean^2 + variance)."""
    return variance / (mean.square() + variance + MIN_SQUARED_MEAN)


def log_noise_to_signal(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log noise-to-signal ratio, log alpha = log(variance / mean^2)."""
    return variance.log() - mean.square().clamp(min=MIN_SQUARED_MEAN).log()


def mode_of_normal_product(mean: Tensor, variance: Tensor, weight: Tensor) -> Tensor:
    """Return the mode [*p] of the product of M normal densities, each raised to a weight.

    That is prod_m N(w; mean_m, variance_m)^weight_m, with means and variances [M, *p], weights [M];
    eq. 5 of MetaVD.
    """
    share = (weight / weight.sum()).reshape(-1, *(1 for _ in mean.shape[1:]))
    precision = share / (variance + 1e-10)
    return (precision * mean).sum(0) / precision.sum(0)
