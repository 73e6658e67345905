"""Hurdle distributions: zero with a probability of its own, otherwise a truncated distribution.

Mullahy, "Specification and Testing of Some Modified Count Data Models", Journal of Econometrics
1986. With the probability h of a zero and a distribution f,

    p(0) = h,    p(y) = (1 - h) f(y) / (1 - f(0))  for y > 0

where f(0) is 0 for continuous f.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

TINY = 1e-30  # probability of a positive value, below which it counts as this
MAX_TRIED_VALUES = 10_000  # values that are tried one after the other


class Hurdle(TorchDistribution):
    """Hurdle distribution of a nonnegative base distribution and a probability of zero.

    Args:
        base: distribution of single numbers, of counts or of positive numbers.
        gate: probability h of a zero.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"gate": dist.constraints.unit_interval}

    def __init__(self, base: Any, gate: Tensor) -> None:
        shape = torch.broadcast_shapes(base.batch_shape, gate.shape)
        self.base, self.gate = base.expand(shape), gate.expand(shape)
        self.is_count = bool(base.support.is_discrete)
        super().__init__(shape, validate_args=False)

    @property
    def support(self) -> Any:
        """Nonnegative whole numbers, or nonnegative numbers."""
        constraints: Any = dist.constraints
        return constraints.nonnegative_integer if self.is_count else constraints.nonnegative

    def expand(self, batch_shape: Any, _instance: Any = None) -> Hurdle:
        """Return the distribution expanded to another batch shape."""
        return Hurdle(self.base.expand(batch_shape), self.gate.expand(batch_shape))

    @property
    def log_positive(self) -> Tensor:
        """Log probability of a positive value of the base distribution."""
        if not self.is_count:
            return torch.zeros_like(self.gate)
        none = self.base.log_prob(torch.zeros_like(self.gate))
        value: Tensor = (-torch.expm1(none)).clamp(min=TINY).log()
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, or the log probability of a count."""
        zero = value == 0
        positive = self.base.log_prob(torch.where(zero, 1.0, value)) - self.log_positive
        log_density: Tensor = torch.where(zero, self.gate.log(), torch.log1p(-self.gate) + positive)
        return log_density

    @property
    def mean(self) -> Tensor:
        """Expected value."""
        value: Tensor = (1 - self.gate) * self.base.mean / self.log_positive.exp()
        return value

    @property
    def variance(self) -> Tensor:
        """Variance."""
        square = self.base.variance + self.base.mean.square()
        value: Tensor = (1 - self.gate) * square / self.log_positive.exp() - self.mean.square()
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values [*sample_shape, *batch_shape]."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            zero = torch.rand(shape).to(self.gate) < self.gate
            value = (
                self._positive(shape)
                if self.is_count
                else self.base.sample(torch.Size(sample_shape))
            )
        return torch.where(zero, torch.zeros_like(value), value)

    def _positive(self, shape: Any) -> Tensor:
        """Draw positive counts: by rejection if they are likely, else by summing probabilities."""
        base, often = self.base.expand(shape), self.log_positive.expand(shape) > -0.7
        value = base.sample()
        while bool((again := often & (value == 0)).any()):
            value = torch.where(again, base.sample(), value)
        if bool(often.all()):
            return torch.as_tensor(value)
        left = torch.rand(shape).to(value) * self.log_positive.exp()
        positive_draws = torch.zeros_like(value)
        for count in range(1, MAX_TRIED_VALUES):
            left = left - base.log_prob(torch.full_like(value, count)).exp()
            positive_draws = torch.where(
                (positive_draws == 0) & (left <= 0), float(count), positive_draws
            )
            if bool(((positive_draws > 0) | often).all()):
                break
        drawn: Tensor = torch.where(often, value, positive_draws)
        return drawn
