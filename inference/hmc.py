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

from pyrofl.inference.definition.rejection import POINT_ERRORS, rejecting
from pyrofl.tensors import add_trailing_axes, times

# Chains, kept draws of each, and iterations per draw.
NUM_CHAINS, DRAWS_PER_CHAIN, THINNING = 256, 16, 4
# Trajectory, in quarters of the period of a normal distribution.
MIN_TRAJECTORY, MAX_TRAJECTORY = 0.2, 2.0
# Updates of the metric during the warm-up, and iterations before each.
NUM_METRIC_UPDATES, ITERATIONS_PER_UPDATE = 4, 10
TARGET_ACCEPTANCE = 0.8  # mean probability of acceptance
MAX_STEPS = 32  # of a trajectory
COVARIANCE_SHRINKAGE = 1e-3  # of a covariance towards its diagonal
# Iterations before the metric is known, and their steps.
APPROACH_ITERATIONS, APPROACH_STEPS = 60, 8
APPROACH_SIZE, APPROACH_TARGET = 0.1, 0.7  # their first step size, and probability of acceptance
DIVERGENT_ENERGY = 1000.0  # loss of energy in a trajectory that has diverged

LogDensity = Callable[[Tensor], Tensor]
"""Points [S, d] -> log densities [S]."""


class Draws(NamedTuple):
    """Draws of a distribution from all chains, with the largest R-hat of a coordinate."""

    u: Tensor  # [S, d]; draws of one iteration are adjacent
    log_density: Tensor  # [S]
    r_hat: float
    diverging: Tensor  # whether the trajectory that ends in a draw has diverged, [S]


class _Point(NamedTuple):
    """Points of all chains with log densities [K] and their gradients [K, d]."""

    u: Tensor
    value: Tensor
    slope: Tensor


def hmc(
    log_density: LogDensity,
    start: Tensor,
    source: Generator,
    draws_per_chain: int | None = None,
    thinning: int | None = None,
    jitter: float = 0.0,
    target: float | None = None,
) -> Draws:
    """Draw from a distribution by Hamiltonian Monte Carlo.

    Args:
        log_density: of points [S, d], differentiable.
        start: a point of each chain, [K, d].
        source: random generator.
        draws_per_chain: draws of each chain; default `DRAWS_PER_CHAIN`.
        thinning: iterations per draw; default `THINNING`.
        jitter: largest random decrease of the step size of each chain in an iteration, relative to
            it, so that no chain stays long where the density is narrow.
        target: mean probability of acceptance; default `TARGET_ACCEPTANCE`.
    """
    draws_per_chain, thinning, target = (
        draws_per_chain or DRAWS_PER_CHAIN,
        thinning or THINNING,
        target or TARGET_ACCEPTANCE,
    )
    now, step = _at(log_density, start), _StepSize(target)
    root = covariance_root(start)

    def iterated(size: float) -> tuple[_Point, Tensor, Tensor]:
        if not jitter:
            return _iterated(log_density, now, root, size, source)
        uniform = torch.rand(len(start), 1, generator=source, dtype=start.dtype)
        sizes, mean = size * (1 - jitter * uniform), size * (1 - jitter / 2)
        return _iterated(log_density, now, root, sizes, source, _steps(mean, source))

    for window in range(NUM_METRIC_UPDATES):
        seen = []
        for _ in range(ITERATIONS_PER_UPDATE):
            now, accepted, _ = iterated(step.size)
            step.adapt(float(accepted.mean()))
            seen.append(now.u)
        now = _restarted(now, seen, source)
        # The first iterations of a window are still on their way.
        root = covariance_root(torch.cat(seen[ITERATIONS_PER_UPDATE // 2 :]))
        step = _StepSize(target, step.average if window else step.size)
    for _ in range(ITERATIONS_PER_UPDATE):
        now, accepted, _ = iterated(step.size)
        step.adapt(float(accepted.mean()))
    points, wrong = [], []
    for _ in range(draws_per_chain):
        ill = torch.zeros(len(start), dtype=torch.bool)
        for _ in range(thinning):
            now, _, diverging = iterated(step.average)
            ill |= diverging
        points.append(now)
        wrong.append(ill)
    u = torch.stack([point.u for point in points])  # [draws, K, d]
    value = torch.cat([point.value for point in points])
    return Draws(u.flatten(0, 1), value, r_hat(u), torch.cat(wrong))


def approach(log_density: LogDensity, start: Tensor, source: Generator) -> Tensor:
    """Return points [K, d] nearer to the bulk of a distribution than the starts [K, d].

    Each chain has its own step size, so that no chain stays where the density is narrow.
    """
    now, root = _at(log_density, start), torch.eye(start.shape[1]).to(start)
    size = start.new_full((len(start), 1), APPROACH_SIZE)
    for _ in range(APPROACH_ITERATIONS):
        now, accepted, _ = _iterated(log_density, now, root, size, source, APPROACH_STEPS)
        size = size * (accepted - APPROACH_TARGET).mul(0.5).exp()[:, None]
    return now.u


def _restarted(now: _Point, seen: list[Tensor], source: Generator) -> _Point:
    """Return the chains, those that never moved in a window of the warm-up at others' points."""
    stuck = (torch.stack(seen) == now.u).all(0).all(-1)  # [K]
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
    within, means = halves.var(0).mean(0), halves.mean(0)  # [d], [2 chains, d]
    total = within * (1 - 1 / len(halves)) + means.var(0)
    return float((total / within).sqrt().max())


class _StepSize:
    """Dual averaging of the log step size."""

    def __init__(self, target: float, start: float = 0.5) -> None:
        self.target, self.size, self.average = target, start, start
        self.count, self.error, self.bias = 0, 0.0, math.log(2 * start)

    def adapt(self, accepted: float) -> None:
        """Update the step size by the mean probability of acceptance of an iteration."""
        self.count += 1
        weight = 1 / (self.count + 5)
        self.error = (1 - weight) * self.error + weight * (self.target - accepted)
        log_size = self.bias - self.count**0.5 / 0.1 * self.error
        part = self.count**-0.75
        self.average = math.exp(part * log_size + (1 - part) * math.log(self.average))
        self.size = math.exp(log_size)


def _iterated(
    log_density: LogDensity,
    now: _Point,
    root: Tensor,
    size: float | Tensor,
    source: Generator,
    steps: int | None = None,
) -> tuple[_Point, Tensor, Tensor]:
    """Run one trajectory of each chain, of a random length unless its steps are given.

    Return the points, the probabilities of acceptance [K], and which trajectories diverged [K].
    """
    momentum = torch.randn(now.u.shape, generator=source, dtype=now.u.dtype)
    steps = steps or _steps(float(size), source)
    uniform = torch.rand(len(now.u), generator=source, dtype=now.u.dtype)
    new, moved = now, momentum
    for _ in range(steps):  # with whitened momenta: u moves along root p, p along root' slope
        moved = moved + 0.5 * size * times(root.mT, new.slope)
        new = _at(log_density, new.u + size * times(root, moved))
        moved = moved + 0.5 * size * times(root.mT, new.slope)
    change = new.value - now.value - 0.5 * (moved.square() - momentum.square()).sum(-1)
    change = change.nan_to_num(nan=-torch.inf)
    probability = change.clamp(max=0.0).exp()
    take = uniform < probability
    accepted_values = (
        torch.where(add_trailing_axes(take, a), a, b) for a, b in zip(new, now, strict=True)
    )
    return _Point(*accepted_values), probability, change < -DIVERGENT_ENERGY


def _steps(size: float, source: Generator) -> int:
    """Return the number of steps of a trajectory of random length."""
    part = float(torch.rand((), generator=source))
    length = math.pi / 2 * (MIN_TRAJECTORY + part * (MAX_TRAJECTORY - MIN_TRAJECTORY))
    return min(MAX_STEPS, math.ceil(length / size))


def _at(log_density: LogDensity, u: Tensor) -> _Point:
    u = u.detach().requires_grad_()
    with torch.enable_grad():
        try:
            value = log_density(u)
        except POINT_ERRORS:
            with rejecting():
                value = log_density(u)
        (slope,) = torch.autograd.grad(value.sum(), u)
    # No part of a distribution has an infinite density: it is a rounding error, and is rejected.
    value = value.detach().nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    return _Point(u.detach(), value, slope.nan_to_num(0.0, 0.0, 0.0))


def covariance_root(u: Tensor) -> Tensor:
    """Return a root of the covariance of points [S, d], shrunk towards its diagonal."""
    centered = u - u.mean(0)
    covariance = centered.mT @ centered / len(u)
    diagonal = covariance.diagonal().clamp(min=1e-20)
    part = len(u[0]) / (len(u[0]) + len(u)) + COVARIANCE_SHRINKAGE
    factor = torch.linalg.cholesky_ex((1 - part) * covariance + part * torch.diag(diagonal))
    return factor.L if not int(factor.info) else torch.diag(diagonal.sqrt())
