"""Truncated distributions: values outside of bounds are not observed.

With a density or probability f, bounds l and u, and M the probability of l <= y <= u,

    p(y) = f(y) / M    for l <= y <= u

(Cohen, Truncated and Censored Samples, Dekker 1991). Bounds belong to the values, as in brms.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

TINY = 1e-30  # probability of the values within the bounds, below which it counts as this
MAX_SUMMED = 1000  # counts whose probabilities are summed
MAX_TRIED_VALUES = 10_000  # counts that are tried one after the other


class Truncated(TorchDistribution):
    """Normal distribution, or distribution of counts, of which values within bounds are seen.

    Args:
        base: distribution of single numbers.
        lower: smallest value.
        upper: largest value; of counts, their probabilities from lower to upper are summed.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, base: Any, lower: float = -math.inf, upper: float = math.inf) -> None:
        self.base, self.lower, self.upper = base, lower, upper
        self.is_count = bool(base.support.is_discrete)
        super().__init__(base.batch_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """Counts of at least 0, or numbers."""
        constraints: Any = dist.constraints
        return constraints.nonnegative_integer if self.is_count else constraints.real

    def expand(self, batch_shape: Any, _instance: Any = None) -> Truncated:
        """Return the distribution expanded to another batch shape."""
        return Truncated(self.base.expand(batch_shape), self.lower, self.upper)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, or the log probability of a count, of values within bounds."""
        log_density: Tensor = self.base.log_prob(value) - self.log_mass
        return log_density

    @property
    def log_mass(self) -> Tensor:
        """Log probability of values within the bounds."""
        if self.is_count:
            inside = self._moment(0)
            return inside.clamp(min=TINY).log()
        a, b = self._ends
        if math.isinf(self.upper) or math.isinf(self.lower):
            one_sided: Tensor = torch.special.log_ndtr(-a if math.isinf(self.upper) else b)
            return one_sided
        flip = a > 0  # into the lower tail, where differences are precise
        high = torch.special.log_ndtr(torch.where(flip, -a, b))
        low = torch.special.log_ndtr(torch.where(flip, -b, a))
        two_sided: Tensor = high + (-torch.expm1(low - high)).clamp(min=TINY).log()
        return two_sided

    @property
    def mean(self) -> Tensor:
        """Expected value."""
        if self.is_count:
            value: Tensor = self._moment(1) / self.log_mass.exp()
            return value
        (first, last), _ = self._ratios
        value = self.base.loc + self.base.scale * (first - last)
        return value

    @property
    def variance(self) -> Tensor:
        """Variance."""
        if self.is_count:
            square = self._moment(2) / self.log_mass.exp()
            value: Tensor = square - self.mean.square()
            return value
        (first, last), spread = self._ratios
        value = self.base.scale.square() * (1 + spread - (first - last).square())
        return value

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values [*sample_shape, *batch_shape]."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            if self.is_count:
                return self._counts(shape)
            a, b = (end.expand(shape) for end in self._ends)
            flip = a > 0
            low, high = torch.where(flip, -b, a), torch.where(flip, -a, b)
            begin, end = torch.special.log_ndtr(low).exp(), torch.special.log_ndtr(high).exp()
            uniform = torch.rand(shape, dtype=begin.dtype)
            z = torch.special.ndtri(begin + uniform * (end - begin))
            value: Tensor = self.base.loc + self.base.scale * torch.where(flip, -z, z)
            return value.clamp(self.lower, self.upper)

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Bounds in standard deviations from the mean of the normal distribution."""
        loc, scale = torch.broadcast_tensors(self.base.loc, self.base.scale)
        return (self.lower - loc) / scale, (self.upper - loc) / scale

    @property
    def _ratios(self) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Standard normal densities at the bounds over the mass, and sum of a p(a) - b p(b)."""
        parts, spread, log_mass = [], torch.zeros(()), self.log_mass
        for end, sign in zip(self._ends, (1, -1), strict=True):
            ratio = (-0.5 * (end.square() + math.log(2 * math.pi)) - log_mass).exp()
            parts.append(ratio)
            spread = spread + sign * torch.where(torch.isfinite(end), end, 0.0) * ratio
        return (parts[0], parts[1]), spread

    def _moment(self, power: int) -> Tensor:
        """Return the sum of a power of counts (0, 1 or 2) times their probabilities, in bounds."""
        is_open, lower = math.isinf(self.upper), max(self.lower, 0)
        first, last = (0, lower - 1) if is_open else (lower, self.upper)
        counts = torch.arange(int(first), int(last) + 1, dtype=self.base.mean.dtype)
        counts = counts.reshape(-1, *[1] * len(self.batch_shape))
        log_probs = self.base.log_prob(counts)
        if is_open and power == 0:
            return -torch.expm1(log_probs.logsumexp(0).clamp(max=-TINY))  # precise if rare
        summed: Tensor = (log_probs.exp() * counts**power).sum(0)
        if not is_open:
            return summed
        mean = self.base.mean
        whole = mean if power == 1 else self.base.variance + mean.square()
        return torch.as_tensor(whole - summed)

    def _counts(self, shape: Any) -> Tensor:
        """Draw counts: by rejection if they are likely, else by summing probabilities."""
        base, log_mass = self.base.expand(shape), self.log_mass.expand(shape)
        often = log_mass > -0.7
        value = torch.as_tensor(base.sample())

        def outside(value: Tensor) -> Tensor:
            return (value < self.lower) | (value > self.upper)

        while bool((again := often & outside(value)).any()):
            value = torch.where(again, base.sample(), value)
        if bool(often.all()):
            return value
        left = torch.rand(shape).to(value) * log_mass.exp()
        first = int(max(self.lower, 0))
        summed, is_drawn = torch.full_like(value, first), often
        for count in range(first, first + MAX_TRIED_VALUES):
            left = left - base.log_prob(torch.full_like(value, count)).exp()
            now = ~is_drawn & (left <= 0)
            summed, is_drawn = torch.where(now, float(count), summed), is_drawn | now
            if bool(is_drawn.all()) or count >= self.upper:
                break
        return torch.where(often, value, summed)


def check_counts(lower: float, upper: float) -> None:
    """Raise ValueError if bounds of truncated counts are no whole numbers, or too many are summed.

    Args:
        lower: smallest count, or -inf.
        upper: largest count, or inf.
    """
    is_whole = all(math.isinf(end) or end == round(end) for end in (lower, upper))
    summed = upper - max(lower, 0) + 1 if math.isfinite(upper) else lower
    if not is_whole or summed > MAX_SUMMED or (math.isinf(upper) and lower < 1) or upper < 0:
        raise ValueError(
            f"bounds of trunc() are {lower:g} and {upper:g}; expected whole numbers for counts, "
            f"such as lb=1 for positive ones, and at most {MAX_SUMMED:,} counts below lb or up to "
            "ub"
        )
