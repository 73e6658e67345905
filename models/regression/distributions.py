"""Distributions of responses that Pyro lacks: skew normal, and zero-one-inflated beta."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor


class SkewNormal(TorchDistribution):
    """Skew normal distribution by its mean, standard deviation and skewness parameter.

    Azzalini, "A Class of Distributions Which Includes the Normal Ones", Scandinavian Journal of
    Statistics 1985, in the parametrization of brms: with d = alpha / sqrt(1 + alpha^2), the scale
    is sd / sqrt(1 - 2 d^2 / pi), and the location is mean - scale d sqrt(2 / pi).

    Args:
        mean: expected value.
        sd: standard deviation.
        alpha: skewness parameter; the distribution is normal at 0.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: ClassVar[Any] = dist.constraints.real

    def __init__(self, mean: Tensor, sd: Tensor, alpha: Tensor) -> None:
        self.mean_, self.sd, self.alpha = torch.broadcast_tensors(mean, sd, alpha)
        super().__init__(self.mean_.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SkewNormal:
        """Return the distribution expanded to another batch shape."""
        return SkewNormal(*(v.expand(batch_shape) for v in (self.mean_, self.sd, self.alpha)))

    @property
    def delta(self) -> Tensor:
        """Correlation d of the two normal variables behind a draw."""
        value: Tensor = self.alpha / (1 + self.alpha.square()).sqrt()
        return value

    @property
    def scale(self) -> Tensor:
        """Scale of the density."""
        value: Tensor = self.sd / (1 - 2 / math.pi * self.delta.square()).sqrt()
        return value

    @property
    def loc(self) -> Tensor:
        """Location of the density."""
        value: Tensor = self.mean_ - self.scale * self.delta * math.sqrt(2 / math.pi)
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        z = (value - self.loc) / self.scale
        normal = -0.5 * (z.square() + math.log(2 * math.pi)) - self.scale.log()
        log_density: Tensor = math.log(2) + normal + torch.special.log_ndtr(self.alpha * z)
        return log_density

    @property
    def mean(self) -> Any:
        """Expected value."""
        return self.mean_

    @property
    def variance(self) -> Tensor:
        """Variance."""
        value: Tensor = self.sd.square()
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values [*sample_shape, *batch_shape]."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            first, second = torch.randn((2, *shape), dtype=self.mean_.dtype)
            z = self.delta * first.abs() + (1 - self.delta.square()).sqrt() * second
            value: Tensor = self.loc + self.scale * z
            return value


class ZeroOneInflatedBeta(TorchDistribution):
    """Mixture of 0, 1 and a beta distribution, of proportions from 0 to 1.

    Ospina and Ferrari, "Inflated Beta Distributions", Statistical Papers 2010: with probability zoi
    a value is 0 or 1, and then 1 with probability coi; otherwise it is from the beta distribution.

    Args:
        mean: expected value of the beta distribution, between 0 and 1.
        phi: precision of the beta distribution.
        zoi: probability of 0 or 1.
        coi: probability of 1 given 0 or 1.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support: ClassVar[Any] = dist.constraints.unit_interval

    def __init__(self, mean: Tensor, phi: Tensor, zoi: Tensor, coi: Tensor) -> None:
        self.parts = torch.broadcast_tensors(mean, phi, zoi, coi)
        super().__init__(self.parts[0].shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ZeroOneInflatedBeta:
        """Return the distribution expanded to another batch shape."""
        return ZeroOneInflatedBeta(*(part.expand(batch_shape) for part in self.parts))

    @property
    def base(self) -> Any:
        """Beta distribution of values that are neither 0 nor 1."""
        mean, phi, _, _ = self.parts
        return dist.Beta(phi * mean, phi * (1 - mean), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of 0 or 1, or the log density of other values."""
        _, _, zoi, coi = self.parts
        is_end = (value == 0) | (value == 1)
        inside = torch.log1p(-zoi) + self.base.log_prob(torch.where(is_end, 0.5, value))
        ends = zoi.log() + torch.where(value == 1, coi, 1 - coi).log()
        return torch.where(is_end, ends, inside)

    @property
    def mean(self) -> Tensor:
        """Expected value."""
        mean, _, zoi, coi = self.parts
        value: Tensor = zoi * coi + (1 - zoi) * mean
        return value

    @property
    def variance(self) -> Tensor:
        """Variance."""
        _, _, zoi, coi = self.parts
        square = self.base.variance + self.base.mean.square()
        value: Tensor = zoi * coi + (1 - zoi) * square - self.mean.square()
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values [*sample_shape, *batch_shape]."""
        shape = torch.Size(sample_shape)
        with torch.no_grad():
            value: Tensor = self.base.sample(shape)
            _, _, zoi, coi = self.parts
            at_end, is_one = torch.rand((2, *value.shape), dtype=value.dtype)
            return torch.where(at_end < zoi, (is_one < coi).to(value), value)


def stopping(eta: Tensor, cutpoints: Tensor) -> Tensor:
    """Return log probabilities of ordered categories that are passed one after the other.

    Tutz, Regression for Categorical Data, Cambridge 2012, section 9.3: P(y = k | y >= k) is
    logistic(cutpoints_k - eta).

    Args:
        eta: linear predictor, [...].
        cutpoints: [..., K - 1].

    Returns:
        Log probabilities, [..., K].
    """
    distance = cutpoints - eta[..., None]
    stops = torch.nn.functional.logsigmoid(distance)
    passes = torch.nn.functional.logsigmoid(-distance).cumsum(-1)
    none = torch.zeros_like(passes[..., :1])
    return torch.cat([none, passes], -1) + torch.cat([stops, none], -1)


def adjacent(eta: Tensor, cutpoints: Tensor) -> Tensor:
    """Return logits of ordered categories whose neighbors have logistic odds.

    Tutz, Regression for Categorical Data, Cambridge 2012, section 9.5: log P(y = k + 1) / P(y = k)
    is eta - cutpoints_k.

    Args:
        eta: linear predictor, [...].
        cutpoints: [..., K - 1].

    Returns:
        Logits, [..., K].
    """
    odds = (eta[..., None] - cutpoints).cumsum(-1)
    return torch.cat([torch.zeros_like(odds[..., :1]), odds], -1)
