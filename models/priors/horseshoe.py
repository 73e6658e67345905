"""Horseshoe prior, which shrinks small effects strongly and large effects little.

    w = loc + scale lambda z,    lambda ~ HalfCauchy(1),    z ~ Normal(0, 1)

Carvalho, Polson and Scott, "The horseshoe estimator for sparse signals", Biometrika 2010. Here
lambda is integrated out, so no further site is needed; the density is exact.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from torch import Size, Tensor
from torch.distributions.utils import broadcast_all

FRACTION_TERMS = 80  # of the continued fraction: 1e-12 at the argument 1


class Horseshoe(TorchDistribution):
    """Horseshoe distribution with location and scale; its density is infinite at its center.

    Its log density is log f(x) - log scale - log(2 pi^3) / 2 with x = (w - loc)^2 / (2 scale^2)
    and f(x) = exp(x) E1(x), E1 the exponential integral (theorem 1 of the paper).

    Args:
        loc: center, where the density is infinite.
        scale: the paper's tau.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Any, scale: Any, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """Location of the distribution, in place of a mean, which does not exist."""
        return self.loc

    def expand(self, batch_shape: Any, _instance: Any = None) -> Horseshoe:
        """Return the distribution expanded to another batch shape."""
        shape = Size(batch_shape)
        return Horseshoe(self.loc.expand(shape), self.scale.expand(shape), validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw samples that are differentiable with respect to loc and scale."""
        shape = self._extended_shape(Size(sample_shape))
        z, local = (torch.empty(shape).to(self.loc).normal_() for _ in range(2))
        other = torch.empty(shape).to(self.loc).normal_()  # a ratio of normals is a Cauchy
        return self.loc + self.scale * (local / other).abs() * z

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density; at the center, where it is infinite, return a finite value.

        That is the log density of the number nearest to the center.
        """
        x = ((value - self.loc) / self.scale).square() / 2
        f = scaled_e1(x.clamp(min=torch.finfo(x.dtype).tiny))
        density: Tensor = f.log() - self.scale.log() - 0.5 * math.log(2 * math.pi**3)
        return density


class _ScaledE1(torch.autograd.Function):
    """Autograd function exp(x) E1(x), with the derivative exp(x) E1(x) - 1 / x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        small, large = x.clamp(max=1), x.clamp(min=1)
        term, series = torch.ones_like(x), -0.5772156649015329 - small.log()
        for k in range(1, 20):  # E1(x) = -gamma - log x - sum_k (-x)^k / (k k!)
            term = -term * small / k
            series = series - term / k
        tail = large + 2 * FRACTION_TERMS + 1
        for k in range(FRACTION_TERMS, 0, -1):  # 1 / (x + 1 - 1 / (x + 3 - 4 / (x + 5 - ...)))
            tail = large + 2 * k - 1 - k * k / tail
        return torch.where(x < 1, small.exp() * series, 1 / tail)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope: Tensor = grads[0] * (scaled_e1(x) - 1 / x)
        return slope


def scaled_e1(x: Tensor) -> Tensor:
    """Return the scaled exponential integral exp(x) E1(x), for x > 0.

    That is the integral from 0 to infinity of exp(-t) / (x + t) dt.
    """
    value: Tensor = _ScaledE1.apply(x)
    return value
