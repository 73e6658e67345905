"""Proposals for the weighted draws: of what clients share, and of what each has for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

FREEDOM = 5.0  # degrees of freedom of the t distribution
REACH = 4.0  # farthest step to a mode, in the guide's standard deviations
PER = 4  # rows of a regression for each of its coefficients


def effective(log_w: Tensor) -> Tensor:
    """Return how many draws normalised log weights [S] are worth."""
    return 1 / log_w.exp().square().sum()


def nearer(proposal: Any, e: Tensor, w: Tensor) -> Any:
    """Return a t distribution whose moments are nearer to those of weighted noise [S, d]."""
    size, mean = e.shape[1], w @ e
    spread = ((e - mean) * w[:, None]).mT @ (e - mean)
    old_mean, old_root = torch.zeros_like(mean), torch.eye(size, dtype=e.dtype)
    if isinstance(proposal, dist.MultivariateStudentT):
        old_mean, old_root = proposal.loc, proposal.scale_tril
    # Few draws know little of a covariance.
    share = float(effective(w.log()) / (effective(w.log()) + 3 * size))
    root = torch.linalg.cholesky(torch.lerp(old_root @ old_root.mT, spread, share))
    loc = torch.lerp(old_mean, mean, share)
    return dist.MultivariateStudentT(e.new_tensor(FREEDOM), loc, root)


@dataclass(frozen=True)
class Predicted:
    """Modes of a client's own noise as a quadratic, or linear, function of the noise of g."""

    slopes: Tensor  # [features, n]
    squares: bool

    @classmethod
    def of(cls, noise: Tensor, modes: Tensor) -> Predicted:
        """Fit known modes [S, n] of noise [S, d] by least squares."""
        squares = PER * _features(noise[:1], True).shape[1] <= len(noise)
        x = _features(noise, squares)
        # A ridge of a small part of the rows' weight, as features may be collinear.
        ridge = 1e-6 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        return cls(torch.linalg.solve(x.mT @ x + ridge, x.mT @ modes), squares)

    def __call__(self, noise: Tensor) -> Tensor:
        """Return the modes [S, n] of noise [S, d]; far out no farther than REACH."""
        found: Tensor = _features(noise, self.squares) @ self.slopes
        length = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        bounded: Tensor = found * (REACH / length.clamp(min=REACH))
        return bounded


def _features(noise: Tensor, squares: bool) -> Tensor:
    """Return 1, the entries of noise [S, d] and, with `squares`, products of two of them."""
    one = noise.new_ones(len(noise), 1)
    row, column = torch.triu_indices(noise.shape[1], noise.shape[1])
    pairs = [noise[:, row] * noise[:, column]] if squares else []
    return torch.cat([one, noise, *pairs], 1)


def evenly(s: int, draws: int, size: int, source: Generator) -> Tensor:
    """Return standard normal noise [S, draws, size], evenly spaced in each of the S sets.

    The points of a set are a lattice with a random shift (Cranley and Patterson, "Randomization of
    number theoretic methods for multiple integration", 1976). Each is standard normal, so that
    means over a set are unbiased; they vary less than those of independent draws.
    """
    if not draws or not size:
        return torch.zeros(s, draws, size, dtype=torch.float64)
    # The first entries are evenly spaced; others are an additive sequence, whose steps are powers
    # of the root of x^size = x + 1.
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / size) if size > 1 else 2.0
    powers = torch.arange(size, dtype=torch.float64)
    places = torch.arange(draws, dtype=torch.float64)[:, None] * ratio**-powers
    places[:, 0] /= draws
    shift = torch.rand(s, 1, size, generator=source, dtype=torch.float64)
    uniform: Tensor = ((places + shift) % 1.0).clamp(1e-15, 1 - 1e-15)
    noise: Tensor = torch.special.ndtri(uniform)
    return noise
