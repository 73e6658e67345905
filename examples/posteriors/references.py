"""Reference posteriors: all rows pooled, by numerical integration or with many chains.

A client's own variables z are standard normal, as all programs are stated in non-centered form.

    quadrature  the one z of a client is integrated out by the trapezoid rule on 121 points of
                [-6, 6]; there may also be none
    normal      where log p(y | u, z) is quadratic in z, it is integrated out in closed form
    grid        no z, and one or two shared variables u: draws from the cells of a grid
    hmc         all sites are drawn together, by `pyrofl.reference.hmc` with 64 chains

What remains for the first two, p(u | y), has few variables. It is drawn from by importance
resampling: from Student's t around its mode, fitted to the draws a few times. z follows given u.

Run: python examples/posteriors/references.py [--problems NAMES]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from density import Density
from metrics import Draws, Reference, statistics
from problems import HERE, NAMES, Problem, load
from torch import Generator, Tensor

from pyrofl import reference
from pyrofl.inference.posteriors.export import smooth_weights
from pyrofl.tensors import generator

POINTS, FARTHEST = 121, 6.0
DRAWS, CELLS_OF_GRID = 4_000, 40_000  # draws that are kept; from a grid
PROPOSED = (8_000, 64_000)  # as many as are needed for
ENOUGH = 4_000  # effective draws
ROUNDS, FIRST, FREEDOM = 4, 1_000, 5.0  # fits of Student's t, their draws, its degrees of freedom
WIDER = 1.2  # covariance of the proposals, relative to that of the draws
CELLS = 500_000  # numbers in a tensor, which then fits a cache
OF_CHAIN = 256  # draws of each chain of Hamiltonian Monte Carlo
KEPT_DRAWS = 1_000  # of the population, in a file
FINE = 400  # cells of a grid along each axis


class Drawn(NamedTuple):
    """Independent draws of u [S, d] and z [S, C, m], and their quality.

    Attributes:
        u: shared variables.
        z: own variables.
        diagnostic: Pareto k of importance weights; 0 for a grid.
        effective: number of draws that they were resampled from.
    """

    u: Tensor
    z: Tensor
    diagnostic: float
    effective: float = math.inf


@dataclass(frozen=True)
class Integrated:
    """A density with the own variables z integrated out."""

    density: Density
    normal: bool  # whether log p(y | u, z) is quadratic in z

    def log_density(self, u: Tensor) -> Tensor:
        """Return log p(u, y) [S] at points u [S, d]."""
        log_prior, log_p = self._likelihoods(u)
        value = self._normal(log_p)[0] if self.normal else self._weights(log_p)[0]
        return log_prior + value.sum(-1)

    def own(self, u: Tensor, source: Generator) -> Tensor:
        """Draw z [S, C, m] given u [S, d]."""
        _, log_p = self._likelihoods(u)
        if self.normal:
            _, mean, root = self._normal(log_p)
            noise = torch.randn(mean.shape, generator=source, dtype=mean.dtype)[..., None]
            return mean + torch.linalg.solve_triangular(root.mT, noise, upper=True)[..., 0]
        share = self._weights(log_p)[1]
        at = torch.multinomial(share.flatten(1).T, 1, generator=source)[:, 0]
        return self.points[at].reshape(*share.shape[1:], -1)

    @property
    def points(self) -> Tensor:
        """Points of z where log p(y | u, z) is evaluated, [K, m]."""
        like, m = self.density.batch.x, self.density.sizes[2]
        if m == 0:
            return like.new_zeros(1, 0)
        if not self.normal:
            return torch.linspace(-FARTHEST, FARTHEST, POINTS).to(like)[:, None]
        one = torch.eye(m).to(like)
        pairs = (one[i] + one[j] for i, j in combinations(range(m), 2))
        return torch.cat([0 * one[:1], one, -one, *(v[None] for v in pairs)])

    def _likelihoods(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(u) [S], and log p(y_j | u, z) [K, S, C] at the points z."""
        z, clients = self.points, self.density.sizes[1]
        each = z[:, None, None].expand(-1, len(u), clients, -1).flatten(0, 1)
        prior, likelihood = self.density.evaluate(u.repeat(len(z), 1), each)
        return prior[: len(u), 0], likelihood.unflatten(0, (len(z), len(u)))

    def _weights(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log of the integral over z [S, C], and the weight of each point in it."""
        if len(log_p) == 1:
            return log_p[0], torch.ones_like(log_p)
        z = self.points[:, 0]
        log_prior = -(z**2) / 2 - math.log(2 * math.pi) / 2 + (z[1] - z[0]).log()
        joint = log_p + log_prior[:, None, None]
        return joint.logsumexp(0), joint.softmax(0)

    def _normal(self, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log of the integral over z, mean of z given u and root of its precision."""
        k = self.points.shape[1]
        none, up, down = log_p[0], log_p[1 : k + 1], log_p[k + 1 : 2 * k + 1]
        slope = (up - down).movedim(0, -1) / 2
        precision = torch.diag_embed(1 + (2 * none - up - down).movedim(0, -1))
        for at, (i, j) in enumerate(combinations(range(k), 2)):
            cross = up[i] + up[j] - none - log_p[2 * k + 1 + at]
            unit = torch.zeros_like(precision[0, 0])
            unit[i, j] = unit[j, i] = 1.0
            precision = precision + cross[..., None, None] * unit
        root = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(slope[..., None], root)[..., 0]
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return none + (slope * mean).sum(-1) / 2 - log_det / 2, mean, root


def mode(log_density: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mode [d] and the inverse curvature there [d, d]."""
    u = start.clone().requires_grad_()
    climb = torch.optim.LBFGS([u], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        """Return the negative log density."""
        climb.zero_grad()
        loss = -log_density(u[None])[0]
        loss.backward()
        return loss

    climb.step(closure)  # type: ignore[arg-type]
    at = u.detach()
    curve = torch.autograd.functional.hessian(lambda v: -log_density(v[None])[0], at)
    values, vectors = torch.linalg.eigh((curve + curve.mT) / 2)
    return at, (vectors / values.clamp(min=0.01)) @ vectors.mT


def students(mean: Tensor, cov: Tensor, draws: int, source: Generator) -> tuple[Tensor, Tensor]:
    """Draw from Student's t [S, d]; also return the log density up to a constant."""
    root, d = torch.linalg.cholesky(cov), len(mean)
    normal = torch.randn(draws, d, generator=source, dtype=mean.dtype)
    halves = torch.randn(draws, int(FREEDOM), generator=source, dtype=mean.dtype)
    wide = (FREEDOM / halves.square().sum(-1)).sqrt()[:, None]
    inner = (normal * wide).square().sum(-1)
    log_q = -(FREEDOM + d) / 2 * (inner / FREEDOM).log1p() - root.diagonal().log().sum()
    return mean + (normal * wide) @ root.mT, log_q


def weighted(density: Density, normal: bool, source: Generator) -> Drawn:
    """Draw by importance resampling from Student's t, with z integrated out."""
    marginal = Integrated(density, normal)
    part = max(1, CELLS // (len(marginal.points) * density.batch.mask.numel()))

    def in_parts(u: Tensor) -> Tensor:
        return torch.cat([marginal.log_density(some) for some in u.split(part)])

    at, cov = mode(marginal.log_density, density.start())
    with torch.no_grad():
        for draws in [FIRST] * ROUNDS + list(PROPOSED):
            u, log_q = students(at, cov, draws, source)
            log_w, k = smooth_weights(in_parts(u) - log_q)
            w = log_w.exp() / log_w.exp().sum()
            effective = float(1 / w.square().sum())
            if draws in PROPOSED and effective > ENOUGH:
                break
            at = w @ u
            cov = WIDER * (u - at).mT @ ((u - at) * w[:, None])
        u = u[torch.multinomial(w, DRAWS, replacement=True, generator=source)]
        z = torch.cat([marginal.own(some, source) for some in u.split(part)])
    return Drawn(u, z, k, effective)


def from_grid(density: Density, problem: Problem, source: Generator) -> Drawn:
    """Draw from the cells of a grid in the box of the problem."""
    marginal, cells = Integrated(density, False), [(b - a) / FINE for a, b in problem.box]
    axes = [
        a + width * (torch.arange(FINE, dtype=density.batch.x.dtype) + 0.5)
        for (a, _), width in zip(problem.box, cells, strict=True)
    ]
    u = torch.cartesian_prod(*axes).reshape(-1, len(axes))
    with torch.no_grad():
        log_p = torch.cat([marginal.log_density(some) for some in u.split(FINE)])
    at = u[torch.multinomial(log_p.softmax(0), CELLS_OF_GRID, True, generator=source)]
    jitter = torch.rand(at.shape, generator=source, dtype=at.dtype) - 0.5
    at = at + jitter * torch.tensor(cells).to(at)
    return Drawn(at, at.new_zeros(len(at), density.sizes[1], 0), 0.0)


def of_sites(density: Density, found: Drawn, names: Sequence[str], own: Sequence[str]) -> Draws:
    """Return draws of sites, [1, S, *p] or of clients [1, S, C, *p]."""
    part = max(1, CELLS // (10 * density.batch.mask.numel()))
    pieces = zip(found.u.split(part), found.z.split(part), strict=True)
    each = [density.values(u, z, names, own) for u, z in pieces]
    return {n: torch.cat([one[n] for one in each]).numpy()[None] for n in names}


def make(problem: Problem, seed: int = 0) -> Reference:
    """Return the reference posterior of a problem."""
    began, source, names = time.process_time(), generator(seed), problem.compared
    program, data = problem.pooled()
    resampled = math.inf
    if problem.made_by == "hmc":
        sampled = reference.hmc(program, data, OF_CHAIN, seed=seed, shared=problem.shared)
        draws: Draws = {n: sampled["posterior"][n].values for n in names}
        diagnostic, effective = sampled.attrs["r_hat"], sampled.attrs["ess"]
    else:
        density = Density.of(program, data, problem.shared)
        if problem.made_by == "grid":
            found = from_grid(density, problem, source)
        else:
            found = weighted(density, problem.made_by == "normal", source)
        draws = of_sites(density, found, names, problem.own.split())
        diagnostic, effective = found.diagnostic, found.effective
        resampled = effective
    flat = {n: draws[n].reshape(-1, *draws[n].shape[2:]) for n in problem.population}
    thin = np.linspace(0, len(flat[problem.population[0]]) - 1, KEPT_DRAWS).astype(int)
    return Reference(
        problem.made_by,
        round(diagnostic, 3),
        None if math.isinf(effective) else round(effective),
        round(time.process_time() - began, 1),
        statistics(draws, names, resampled),
        {n: v[thin].astype(np.float32) for n, v in flat.items()},
    )


def main() -> None:
    """Make and store references."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=NAMES, choices=NAMES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.problems:
        if (problem := load(name)).reference == name:
            made = make(problem)
            made.save(HERE / "references", name)
            told = {n: getattr(made, n) for n in ("diagnostic", "effective", "seconds")}
            print(name, json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
