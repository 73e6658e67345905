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

from pyrofl.models.regression.truncated import Truncated


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
        self.positive = Truncated(self.base, lower=1) if self.is_count else self.base
        super().__init__(shape, validate_args=False)

    @property
    def support(self) -> Any:
        """Nonnegative whole numbers, or nonnegative numbers."""
        constraints: Any = dist.constraints
        return constraints.nonnegative_integer if self.is_count else constraints.nonnegative

    def expand(self, batch_shape: Any, _instance: Any = None) -> Hurdle:
        """Return the distribution expanded to another batch shape."""
        return Hurdle(self.base.expand(batch_shape), self.gate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, or the log probability of a count."""
        zero = value == 0
        positive = self.positive.log_prob(torch.where(zero, 1.0, value))
        log_density: Tensor = torch.where(zero, self.gate.log(), torch.log1p(-self.gate) + positive)
        return log_density

    @property
    def mean(self) -> Tensor:
        """Expected value."""
        value: Tensor = (1 - self.gate) * self.positive.mean
        return value

    @property
    def variance(self) -> Tensor:
        """Variance."""
        square = self.positive.variance + self.positive.mean.square()
        value: Tensor = (1 - self.gate) * square - self.mean.square()
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values [*sample_shape, *batch_shape]."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            zero = torch.rand(shape).to(self.gate) < self.gate
            value = self.positive.sample(torch.Size(sample_shape))
        return torch.where(zero, torch.zeros_like(value), value)
