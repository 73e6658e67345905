"""Normal priors with one scale per client, and fast gradients of their log densities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyrofl.tensors import add_trailing_axes


def spherical(fn: TorchDistribution, axes: int, group: object = None) -> Spherical:
    """Return a normal distribution with equal scales along its last axes, the event dimensions."""
    prior = Spherical(fn, axes)
    prior.group = group
    return prior


class Spherical(dist.Independent):
    """Distribution of independent normals with one scale for all entries of an event.

    The log density of an event needs only one logarithm.

    Attributes:
        group: Sites of one group have the same scale; None has no group.
    """

    group: object = None

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of events, which are arrays of normals with equal scale."""
        constant = self.scale.log() + 0.5 * math.log(2 * math.pi)
        return -self.distance(value) - self.entries * constant

    def distance(self, value: Tensor) -> Tensor:
        """Return half the squared distance of a value from the mean, divided by the variance.

        It is the log density of the mean minus that of the value.
        """
        squares: Tensor = (value - self.base_dist.loc).square().sum(tuple(range(-self._axes, 0)))
        return squares / 2 / self.scale.square()

    @property
    def entries(self) -> int:
        """Number of entries of an event, such as a weight matrix."""
        return int(self.event_shape.numel())

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the normals in each event."""
        scale: Tensor = self.base_dist.scale[(..., *(0,) * self._axes)]
        return scale

    @property
    def _axes(self) -> int:
        return int(self.reinterpreted_batch_ndims)


def distances(priors: Sequence[Spherical], values: Sequence[Tensor]) -> Tensor:
    """Return half the squared distances, in sds, between values and prior means, summed over sites.

    Values are [C, 1, *p]; each site's prior has one scale per client, [C, 1].
    """
    centers = [prior.base_dist.loc for prior in priors]
    pairs = zip(values, centers, strict=True)
    if any(v.shape != c.shape or v.dtype != c.dtype or v.shape[1] != 1 for v, c in pairs):
        each = (prior.distance(v) for prior, v in zip(priors, values, strict=True))
        return reduce(torch.add, each)
    half_squares: Tensor = HalfSquares.apply(len(values), *values, *centers)
    return half_squares / priors[0].scale.square()


class HalfSquares(torch.autograd.Function):
    """Autograd function for half the sum of squared differences between values and centers.

    All differences are in one tensor, so that one operation computes all norms.
    """

    @staticmethod
    def forward(ctx: Any, many: int, *pairs: Tensor) -> Tensor:
        """Compute half the sum of squared differences [C, 1] between values and centers."""
        values, centers = pairs[:many], pairs[many:]
        ctx.save_for_backward(*pairs)
        ctx.sizes = [v[0].numel() for v in values]
        ctx.differences = values[0].new_empty(len(values[0]), sum(ctx.sizes))
        parts = ctx.differences.split(ctx.sizes, 1)
        for value, center, part in zip(values, centers, parts, strict=True):
            torch.sub(value, center, out=part.view(value.shape))
        length: Tensor = torch.linalg.vector_norm(ctx.differences, dim=1, keepdim=True)
        return length.square() / 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to values and centers."""
        saved = ctx.saved_tensors
        values, centers = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        if torch.is_grad_enabled():  # second derivatives need the inputs
            pairs = zip(values, centers, strict=True)
            up = [add_trailing_axes(grads[0], v) * (v - c) for v, c in pairs]
        else:
            parts = (grads[0] * ctx.differences).split(ctx.sizes, 1)  # [C, p] each
            up = [part.view(v.shape) for part, v in zip(parts, values, strict=True)]
        needed = ctx.needs_input_grad[1 + len(up) :]
        return (
            None,
            *up,
            *(-v if is_needed else None for v, is_needed in zip(up, needed, strict=True)),
        )
