"""What the posteriors are, all rows pooled: by NUTS, or by numerical integration.

A client's own variables are taken standard normal: a centred program is stated non-centred. Where
there is one z, it is integrated out by the trapezoid rule on 121 points of [-6, 6], which is exact
to many digits for what is as smooth as this; where log p(y | g, z) is quadratic in z, it is in
closed form. What remains, p(g | y), has few variables, and is drawn from by importance resampling:
from Student's t around its mode, which is fitted to the draws a few times. z follows given g.
Otherwise NUTS draws both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from problems import Problem
from pyro import poutine
from torch import Generator, Tensor

from pyrofl import reference
from pyrofl.data import Batch
from pyrofl.inference.elbo import latent, log_prob, observed, weighed
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.inference.programs import Program
from pyrofl.models.pvi.unconstrained import Layout, decentred, layouts
from pyrofl.tensors import generator, matches

POINTS, FARTHEST = 121, 6.0
CHAINS, DRAWS = 4, 1000  # that are kept
PROPOSED = (8_000, 64_000)  # as many as are needed for
ENOUGH = 4_000  # effective draws
ROUNDS, FIRST, FREEDOM = 4, 1_000, 5.0  # fits of Student's t, their draws, its degrees of freedom
WIDER = 1.2  # covariance of the proposals, than that of the draws
CELLS = 4_000_000  # numbers in a tensor


class Reference(NamedTuple):
    """Draws of what is compared, and what they cost.

    Attributes:
        draws: [chain, draw, *p], own sites [chain, draw, C, *p].
        seconds: of a processor.
        quality: R-hat of NUTS, the largest; or Pareto k of the importance weights.
        effective: draws, the least of NUTS; or those of the importance weights.
    """

    draws: dict[str, np.ndarray]
    seconds: float
    quality: float
    effective: float


@dataclass(frozen=True)
class Aggregator:
    """All rows of all clients under a program whose own sites, z [k], are standard normal.

    Attributes:
        program: a program.
        batch: all clients.
        ours: the shared sites as one vector without constraints.
        sizes: entries of each own site; None where it has no axis of its own.
        normal: whether log p(y | g, z) is quadratic in z; otherwise k is 1.
    """

    program: Program
    batch: Batch
    ours: Layout
    sizes: Mapping[str, int | None]
    normal: bool

    def values(self, u: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the shared sites [S, 1, 1, *p] at points u [S, d], and the log Jacobian [S]."""
        found, log_jacobian = {}, torch.zeros(len(u)).to(u)
        parts = u.split([len(site.mean) for site in self.ours.sites], -1)
        for site, part in zip(self.ours.sites, parts, strict=True):
            free = part.reshape(len(u), 1, 1, *site.shape)
            found[site.name] = site.transform(free)
            growth = site.transform.log_abs_det_jacobian(free, found[site.name])
            log_jacobian = log_jacobian + growth.reshape(len(u), -1).sum(-1)
        return found, log_jacobian

    def log_density(self, u: Tensor) -> Tensor:
        """Return log p(g, y) + the log Jacobian at points u [S, d], z integrated out."""
        known, log_jacobian = self.values(u)
        log_prior, log_p = self.looked_at(known)
        value = self._normal(log_p)[0] if self.normal else self._weights(log_p)[0]
        return log_prior + log_jacobian + value.sum(-1)

    def looked_at(self, known: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return log p(g) [S], and log p(y_j | g, z) [K, S, C] at the points z."""
        z = self.points()[:, None, None, None]  # [K, S, C, row, k]
        inner = run(self.program, {**known, **self._own(z)}, self.batch)
        seen = dict(observed(inner))
        rows = (n for n in seen if n not in known and n not in self.sizes)
        log_p = sum(weighed(seen[n], log_prob(n, seen[n])).sum(-1) for n in rows)
        prior = (log_prob(n, seen[n])[:, 0, 0] for n in known)
        return sum(prior), log_p  # type: ignore[return-value]

    def points(self) -> Tensor:
        """Return where log p(y | g, z) is looked at, [K, k]."""
        like, k = self.batch.x, sum(size or 1 for size in self.sizes.values())
        if not self.normal:
            return torch.linspace(-FARTHEST, FARTHEST, POINTS).to(like)[:, None]
        one = torch.eye(k).to(like)
        pairs = (one[i] + one[j] for i, j in combinations(range(k), 2))
        return torch.cat([0 * one[:1], one, -one, *(v[None] for v in pairs)])

    def own(self, known: Mapping[str, Tensor], source: Generator) -> dict[str, Tensor]:
        """Draw own sites [S, C, 1, size] given shared ones [S, 1, 1, *p]."""
        _, log_p = self.looked_at(known)
        if self.normal:
            _, mean, root = self._normal(log_p)
            noise = torch.randn(mean.shape, generator=source, dtype=mean.dtype)[..., None]
            z = mean + torch.linalg.solve_triangular(root.mT, noise, upper=True)[..., 0]
        else:
            share = self._weights(log_p)[1]
            at = torch.multinomial(share.flatten(1).T, 1, generator=source)[:, 0]
            z = self.points()[at].reshape(*share.shape[1:], 1)
        return self._own(z[..., None, :])

    def _own(self, z: Tensor) -> dict[str, Tensor]:
        """Part z [..., k] into own sites."""
        parts = z.split([size or 1 for size in self.sizes.values()], -1)
        own = zip(self.sizes.items(), parts, strict=True)
        return {n: part if size else part[..., 0] for (n, size), part in own}

    def _weights(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log of the integral over z and the share of every point in it."""
        z = self.points()[:, 0]
        log_prior = -(z**2) / 2 - math.log(2 * math.pi) / 2 + (z[1] - z[0]).log()
        joint = log_p + log_prior[:, None, None]
        return joint.logsumexp(0), joint.softmax(0)

    def _normal(self, log_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log of the integral over z, mean of z given g and root of its precision."""
        k = self.points().shape[1]
        none, up, down = log_p[0], log_p[1 : k + 1], log_p[k + 1 : 2 * k + 1]
        slope = (up - down).movedim(0, -1) / 2
        precision = torch.diag_embed(1 + (2 * none - up - down).movedim(0, -1))
        for at, (i, j) in enumerate(combinations(range(k), 2)):
            unit = torch.zeros_like(precision[0, 0])
            unit[i, j] = unit[j, i] = 1.0
            precision = (
                precision + (up[i] + up[j] - none - log_p[2 * k + 1 + at])[..., None, None] * unit
            )
        root = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve(slope[..., None], root)[..., 0]
        log_det = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return none + (slope * mean).sum(-1) / 2 - log_det / 2, mean, root


def run(program: Program, known: Mapping[str, Tensor], batch: Batch) -> Any:
    """Run a program with known sites, and return its trace."""
    with pyro.validation_enabled(False):
        return poutine.trace(poutine.condition(program, known)).get_trace({}, {}, batch)


def pooled(problem: Problem) -> Aggregator:
    """Return the non-centred program with all rows."""
    program, data = problem.pooled()
    one = data.batch(torch.tensor([0]))
    program = decentred(program, one)
    ours, _ = layouts(program, one, problem.shared, 10.0)
    with torch.no_grad():
        trace = run(program, {}, one)
    sizes: dict[str, int | None] = {
        n: site["fn"].event_shape.numel() if site["fn"].event_shape else None
        for n, site in latent(trace)
        if not matches(n, ours.names)
    }
    everybody = data.batch(torch.arange(data.clients))
    return Aggregator(program, everybody, ours, sizes, problem.exact == "normal")


def mode(log_density: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """Return mode [d] and inverse curvature there [d, d]."""
    u = start.clone().requires_grad_()
    climb = torch.optim.LBFGS([u], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
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
    """Draw from Student's t [S, d]; return the log density, but for a constant, too."""
    root, d = torch.linalg.cholesky(cov), len(mean)
    normal = torch.randn(draws, d, generator=source, dtype=mean.dtype)
    halves = torch.randn(draws, int(FREEDOM), generator=source, dtype=mean.dtype)
    wide = (FREEDOM / halves.square().sum(-1)).sqrt()[:, None]
    inner = (normal * wide).square().sum(-1)
    log_q = -(FREEDOM + d) / 2 * (inner / FREEDOM).log1p() - root.diagonal().log().sum()
    return mean + (normal * wide) @ root.mT, log_q


def resampled(problem: Problem, seed: int) -> tuple[dict[str, Tensor], float, float]:
    """Return draws of the compared sites, Pareto k and the effective number of draws."""
    all_rows, source = pooled(problem), generator(seed)
    cells = len(all_rows.points()) * all_rows.batch.mask.numel()
    part = max(1, CELLS // cells)

    def in_parts(u: Tensor) -> Tensor:
        return torch.cat([all_rows.log_density(some) for some in u.split(part)])

    at, cov = mode(all_rows.log_density, all_rows.ours.prior()[0].to(all_rows.batch.x))
    with torch.no_grad():
        for draws in [FIRST] * ROUNDS + list(PROPOSED):
            u, log_q = students(at, cov, draws, source)
            log_w = in_parts(u) - log_q
            smooth, k = import_arviz().psislw(log_w.numpy())
            w = torch.tensor(smooth).exp()
            w = w / w.sum()
            effective = float(1 / w.square().sum())
            if draws in PROPOSED and effective > ENOUGH:
                break
            at = w @ u
            cov = WIDER * (u - at).mT @ ((u - at) * w[:, None])
        chosen = u[torch.multinomial(w, CHAINS * DRAWS, replacement=True, generator=source)]
        parts = []
        for some in chosen.split(part):
            known, _ = all_rows.values(some)
            own = all_rows.own(known, source)
            parts.append(said(problem, all_rows, known | own))
    return joined(parts), float(k), effective


def sampled(problem: Problem, seed: int) -> tuple[dict[str, Tensor], float, float]:
    """Return draws of NUTS of the compared sites, R-hat and the least effective draws."""
    program, data = problem.pooled()
    one = data.batch(torch.tensor([0]))
    program = decentred(program, one)
    shared = layouts(program, one, problem.shared, 10.0)[0].names
    draws, warmup = problem.nuts
    found = reference.nuts(
        program, data, draws, warmup, CHAINS, seed=seed, shared=shared, jit=True
    )["posterior"][list(problem.compared)]
    az = import_arviz()
    worst = [float(of(found).to_array().max()) for of in (az.rhat, lambda v: -az.ess(v))]
    return {n: torch.tensor(found[n].values) for n in problem.compared}, worst[0], -worst[1]


def said(problem: Problem, rows: Aggregator, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the compared sites, [S, *p] or [S, C, *p], in draws of the latent ones."""
    inner = run(rows.program, known, rows.batch)
    values = {n: inner.nodes[n]["value"] for n in problem.compared}
    own = problem.own.split()
    return {n: v[:, :, 0] if n in own else v[:, 0, 0] for n, v in values.items()}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put parts one behind the other, and name their axes chain and draw."""
    return {
        n: torch.cat([part[n] for part in parts]).unflatten(0, (CHAINS, DRAWS)) for n in parts[0]
    }


def drawn(problem: Problem, seed: int = 0) -> Reference:
    """Return draws of what is compared."""
    began = time.process_time()
    make = sampled if problem.exact == "nuts" else resampled
    found, quality, effective = make(problem, seed)
    draws = {n: v.numpy() for n, v in found.items()}
    return Reference(draws, time.process_time() - began, quality, effective)


def cached(problem: Problem, folder: Path) -> Reference:
    """Return `drawn`, which is kept in a folder from the first time on."""
    path = folder / f"{problem.name}.npz"
    if not path.exists():
        made = drawn(problem)
        folder.mkdir(parents=True, exist_ok=True)
        numbers = {"seconds": made.seconds, "quality": made.quality, "effective": made.effective}
        np.savez_compressed(path, **made.draws, **numbers)
    with np.load(path) as kept:
        draws = {n: kept[n] for n in problem.compared}
        return Reference(draws, *(float(kept[n]) for n in ("seconds", "quality", "effective")))
