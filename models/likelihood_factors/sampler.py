"""Hamiltonian Monte Carlo with many chains in one vectorized batch.

The chains share step size and metric, which are adapted to all of them: the metric is their
covariance, so that few iterations suffice, and the step size is that of dual averaging (Hoffman and
Gelman, "The No-U-Turn Sampler", 2014). A trajectory is a random part of the period of a normal
distribution, as after a quarter of it draws are independent (Neal, "MCMC using Hamiltonian
dynamics", 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pyrofl.tensors import like, times

CHAINS, KEPT, THINNING = 256, 16, 4  # chains, kept draws of each, and iterations per draw
SHORTEST, LONGEST = 0.2, 2.0  # trajectory, in quarters of the period of a normal distribution
WINDOWS, WARM = 4, 10  # updates of the metric during the warm-up, and iterations before each
TARGET = 0.8  # mean probability of acceptance
MOST_STEPS = 32  # of a trajectory
SINGULAR: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]
SHRINK = 1e-3  # of a covariance towards its diagonal

LogDensity = Callable[[Tensor], Tensor]
"""Points [S, d] -> log densities [S]."""


class Draws(NamedTuple):
    """Draws of a distribution from all chains, with the largest R-hat of a coordinate."""

    u: Tensor  # [S, d]; draws of one iteration are adjacent
    log_density: Tensor  # [S]
    r_hat: float


class _Point(NamedTuple):
    """Points of all chains with log densities [K] and their gradients [K, d]."""

    u: Tensor
    value: Tensor
    slope: Tensor


def hmc(log_density: LogDensity, start: Tensor, source: Generator) -> Draws:
    """Draw from a distribution by Hamiltonian Monte Carlo, from given starts [K, d]."""
    now, step = _at(log_density, start), _StepSize()
    root = _root(start)
    for window in range(WINDOWS):
        seen = []
        for _ in range(WARM):
            now, accepted = _iterated(log_density, now, root, step.size, source)
            step.adapt(accepted)
            seen.append(now.u)
        now = _restarted(now, seen, source)
        # The first iterations of a window are still on their way.
        root = _root(torch.cat(seen[WARM // 2 :]))
        step = _StepSize(step.average if window else step.size)
    for _ in range(WARM):
        now, accepted = _iterated(log_density, now, root, step.size, source)
        step.adapt(accepted)
    found = []
    for _ in range(KEPT):
        for _ in range(THINNING):
            now, _ = _iterated(log_density, now, root, step.average, source)
        found.append(now)
    u = torch.stack([point.u for point in found])
    return Draws(u.flatten(0, 1), torch.cat([point.value for point in found]), r_hat(u))


def _restarted(now: _Point, seen: list[Tensor], source: Generator) -> _Point:
    """Return the chains, those that never moved in a window of the warm-up at others' points."""
    stuck = (torch.stack(seen) == now.u).all(0).all(-1)
    if not bool(stuck.any()) or bool(stuck.all()):
        return now
    at = torch.arange(len(stuck))
    moved = at[~stuck]
    chosen = torch.randint(len(moved), (int(stuck.sum()),), generator=source)
    at = at.masked_scatter(stuck, moved[chosen])
    return _Point(*(part[at] for part in now))


def r_hat(draws: Tensor) -> float:
    """Return the largest rank-normalized R-hat of any coordinate of draws [iterations, chains, d].

    As Vehtari et al., "Rank-Normalization, Folding, and Localization", 2021.
    """
    ranks = draws.flatten(0, 1).argsort(0).argsort(0).reshape(draws.shape)
    draws = torch.special.ndtri((ranks + 0.625) / (ranks[..., 0].numel() + 0.25))
    halves = torch.cat([draws[: len(draws) // 2], draws[-(len(draws) // 2) :]], 1)
    within, means = halves.var(0).mean(0), halves.mean(0)
    total = within * (1 - 1 / len(halves)) + means.var(0)
    return float((total / within).sqrt().max())


class _StepSize:
    """Dual averaging of the log step size."""

    def __init__(self, start: float = 0.5) -> None:
        self.size = self.average = start
        self.count, self.error, self.bias = 0, 0.0, math.log(2 * start)

    def adapt(self, accepted: float) -> None:
        """Update the step size by the mean probability of acceptance of an iteration."""
        self.count += 1
        weight = 1 / (self.count + 5)
        self.error = (1 - weight) * self.error + weight * (TARGET - accepted)
        log_size = self.bias - self.count**0.5 / 0.1 * self.error
        part = self.count**-0.75
        self.average = math.exp(part * log_size + (1 - part) * math.log(self.average))
        self.size = math.exp(log_size)


def _iterated(
    log_density: LogDensity, now: _Point, root: Tensor, size: float, source: Generator
) -> tuple[_Point, float]:
    """Run one trajectory of each chain; return the points and the mean acceptance probability."""
    momentum = torch.randn(now.u.shape, generator=source, dtype=now.u.dtype)
    part = float(torch.rand((), generator=source))
    length = math.pi / 2 * (SHORTEST + part * (LONGEST - SHORTEST))
    uniform = torch.rand(len(now.u), generator=source, dtype=now.u.dtype)
    steps = min(MOST_STEPS, math.ceil(length / size))
    new, moved = now, momentum
    for _ in range(steps):  # with whitened momenta: u moves along root p, p along root' slope
        moved = moved + 0.5 * size * times(root.mT, new.slope)
        new = _at(log_density, new.u + size * times(root, moved))
        moved = moved + 0.5 * size * times(root.mT, new.slope)
    change = new.value - now.value - 0.5 * (moved.square() - momentum.square()).sum(-1)
    probability = change.nan_to_num(nan=-torch.inf).clamp(max=0.0).exp()
    take = uniform < probability
    kept = (torch.where(like(take, a), a, b) for a, b in zip(new, now, strict=True))
    return _Point(*kept), float(probability.mean())


def _at(log_density: LogDensity, u: Tensor) -> _Point:
    u = u.detach().requires_grad_()
    try:
        with torch.enable_grad():
            value = log_density(u)
            (slope,) = torch.autograd.grad(value.sum(), u)
    except SINGULAR:  # a matrix of the program, at some point
        if len(u) == 1:
            return _Point(u.detach(), u.new_full((1,), -torch.inf), torch.zeros_like(u))
        parts = [_at(log_density, half) for half in u.tensor_split(2)]
        return _Point(*(torch.cat(part) for part in zip(*parts, strict=True)))
    value = value.detach().nan_to_num(nan=-torch.inf)
    return _Point(u.detach(), value, slope.nan_to_num(0.0, 0.0, 0.0))


def _root(u: Tensor) -> Tensor:
    """Return a root of the covariance of points [S, d], shrunk towards its diagonal."""
    centered = u - u.mean(0)
    covariance = centered.mT @ centered / len(u)
    diagonal = covariance.diagonal().clamp(min=1e-20)
    part = len(u[0]) / (len(u[0]) + len(u)) + SHRINK
    found = torch.linalg.cholesky_ex((1 - part) * covariance + part * torch.diag(diagonal))
    return found.L if not int(found.info) else torch.diag(diagonal.sqrt())
