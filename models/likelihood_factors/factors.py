"""Normal likelihood factors: their integrals, and their update at a client.

    t(v) = exp(-v' P v / 2 + h' v),  v = (u, e)      u [p] shared variables, e [m] own effects

With e ~ N(0, T T') the integral over e, and the effects given u, are known in closed form:

    A = 1 + T' P_ee T,    b = T' (h_e - P_eu u),    e = T eta,  eta | u ~ N(A^-1 b, A^-1)
    log t(u, T) = -log det A / 2 + b' A^-1 b / 2 - u' P_uu u / 2 + h_u' u

A client computes its factor at the point u where its exact marginal likelihood L(u) times the
cavity is highest, and with the server's T. There t(u, T) and L(u) have the same gradients by u and
T, and the same second derivatives by u: with expectations under p(eta | u, y), l the log likelihood
and s = dl / du,

    dL = E s,    d2L = E d2l + Cov(s),    mean and covariance of eta, and Cov(eta, s),

are those of the factor. Nodes of the expectations are those of Gauss and Hermite around the mode of
eta, or, for more than two effects, a lattice with weights.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.posteriors.proposals import evenly
from pyrofl.models.likelihood_factors.structure import Structure
from pyrofl.models.pvi.gaussians import balanced
from pyrofl.tensors import Tensors, generator, like, times

NODES = {0: 1, 1: 31, 2: 11}  # per effect; of more effects LATTICE in all
LATTICE = 128
STEPS, MODES = 40, 40  # Newton steps at most, by u and by eta
CLOSE = 1e-10  # Newton decrement that ends them
INDEFINITE = 0.5  # negative curvature of log L that is kept, relative to that of the cavity


def integrate(
    u: Tensor, root: Tensor, noise: Tensor, factors: Tensors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log t(u, T) [S, J] of J factors, b [S, J, m] and a Cholesky root of A [S, J, m, m].

    Args:
        u: the p shared variables that likelihoods read, [S, p].
        root: T, [S, m, m].
        noise: inverse noise variance of linear models, which multiplies P and h; else 1, [S].
        factors: shift h [J, p + m], precision P [J, p + m, p + m]; and of linear models square and
            count [J], see `linear`.
    """
    p, shift, precision = u.shape[-1], factors["shift"], factors["precision"]
    of_u, of_e = precision[:, :p, :p], precision[:, p:, p:]
    root = root * noise.sqrt()[:, None, None]
    a = torch.einsum("sik,jil,slm->sjkm", root, of_e, root)
    lower = torch.linalg.cholesky_ex(a + torch.eye(a.shape[-1], dtype=a.dtype)).L
    pull = shift[:, p:] - torch.einsum("jik,sk->sji", precision[:, p:, :p], u)
    b = torch.einsum("sik,sji->sjk", root, pull * noise.sqrt()[:, None, None])
    half = torch.linalg.solve_triangular(lower, b[..., None], upper=False)[..., 0]
    value = 0.5 * half.square().sum(-1) - lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    of_shared = u @ shift[:, :p].mT - 0.5 * torch.einsum("si,jik,sk->sj", u, of_u, u)
    if "count" in factors:
        value = value + 0.5 * noise.log()[:, None] * factors["count"]
        of_shared = of_shared - 0.5 * factors["square"]
    return value + noise[:, None] * of_shared, b, lower


class Expansion(NamedTuple):
    """Log marginal likelihood of C clients, its derivatives, and moments of eta given u and y."""

    value: Tensor  # log L, [C]
    score: Tensor  # dL / du, [C, p]
    hessian: Tensor  # [C, p, p]
    mode: Tensor  # of eta, [C, m]
    mean: Tensor  # [C, m]
    inverse: Tensor  # of the covariance, at least 1, [C, m, m]
    cross: Tensor  # Cov(eta, s), [C, m, p]


class Factor(NamedTuple):
    """Update of the factors of C clients at a cavity of the shared variables."""

    structure: Structure
    u: Tensor  # mean of the cavity of all shared variables, [C, d]
    precision: Tensor  # of the cavity of those that the likelihood reads, [C, p, p]
    root: Tensor  # T, [C, m, m]
    batch: Batch

    def update(self) -> Tensors:
        """Return shift [C, n] and precision [C, n, n] of the factors, and where they are exact."""
        at, found = self._climb()
        return self._stated(at, found) | {"mean": self.u.index_copy(1, self.structure.reads, at)}

    def _climb(self) -> tuple[Tensor, Expansion]:
        """Return the maximum of L(u) times the cavity, [C, p], and the expansion there."""
        reads = self.structure.reads
        at = start = self.u[:, reads]
        best = self._expand(at, self.root.new_zeros(self.root.shape[:-1]))
        height, share = best.value, torch.ones_like(best.value)
        done = torch.zeros_like(share, dtype=torch.bool)
        for _ in range(STEPS):
            slope = best.score - times(self.precision, at - start)
            way = torch.linalg.solve(self.precision + self._curvature(best), slope[..., None])[
                ..., 0
            ]
            done = done | ((slope * way).sum(-1) < CLOSE) | (share < 1e-8)
            if bool(done.all()):
                break
            new = at + torch.where(done, 0.0, share)[:, None] * way
            there = self._expand(new, best.mode)
            off = new - start
            level = there.value - 0.5 * (off * times(self.precision, off)).sum(-1)
            good = (level >= height - 1e-9 * height.abs()) & ~done
            at, height = torch.where(good[:, None], new, at), torch.where(good, level, height)
            best = Expansion(
                *(torch.where(like(good, a), a, b) for a, b in zip(there, best, strict=True))
            )
            share = torch.where(good, 1.0, share / 4)
        return at, best

    def _curvature(self, found: Expansion) -> Tensor:
        """Return minus the Hessian of log L [C, p, p], bounded below relative to the cavity."""
        lower = torch.linalg.cholesky(self.precision)
        inner = torch.linalg.solve_triangular(lower, -found.hessian, upper=False)
        inner = torch.linalg.solve_triangular(lower, inner.mT, upper=False)
        values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
        half = lower @ vectors
        bounded: Tensor = (half * values.clamp(min=-INDEFINITE)[:, None]) @ half.mT
        return bounded

    def _stated(self, at: Tensor, found: Expansion) -> Tensors:
        """Return the factor with the derivatives and moments of an expansion at `at`."""
        one = torch.eye(self.root.shape[-1], dtype=self.root.dtype)
        back = torch.linalg.inv(self.root).mT  # from eta to e
        of_e = back @ (found.inverse - one) @ back.mT
        across = -back @ found.inverse @ found.cross
        mean = times(self.root, found.mean)
        given = found.cross.mT @ found.inverse @ found.cross  # P_ue Cov(e) P_eu
        of_u = self._curvature(found) + given
        shift_e = times(back @ found.inverse, found.mean) + times(across, at)
        shift_u = found.score + times(of_u, at) + times(across.mT, mean)
        top, bottom = torch.cat([of_u, across.mT], -1), torch.cat([across, of_e], -1)
        # Where no point with a likelihood was found, the factor is 1.
        known = found.value.isfinite()
        shift, precision = torch.cat([shift_u, shift_e], -1), torch.cat([top, bottom], -2)
        return {
            "shift": torch.where(known[:, None], shift, 0.0),
            "precision": torch.where(known[:, None, None], precision, 0.0),
        }

    def _expand(self, at: Tensor, near: Tensor) -> Expansion:
        """Return the expansion of the clients' log marginal likelihoods at `at` [C, p]."""
        reads, m = self.structure.reads, self.root.shape[-1]
        u = self.u.index_copy(1, reads, at)
        mode, root = self._mode(u, near)
        nodes, log_weight = rule(m)
        inner = torch.einsum("cij,sj->sci", root, nodes.to(u))
        eta = mode + inner
        u = u.expand(len(nodes), -1, -1).clone().requires_grad_()
        with torch.enable_grad():
            value = self._log_likelihood(u, eta)
            (slopes,) = torch.autograd.grad(value.sum(), u, create_graph=True)
            log_w = value.detach() - 0.5 * eta.square().sum(-1) + log_weight.to(u)[:, None]
            log_w = log_w.nan_to_num(nan=-torch.inf)
            w = log_w.softmax(0).nan_to_num(0.0)
            rows = [
                torch.autograd.grad(
                    (w * slopes[..., i]).sum(), u, retain_graph=True, materialize_grads=True
                )[0]
                for i in reads.tolist()
            ]
        s = slopes.detach()[..., reads].nan_to_num(0.0, 0.0, 0.0)
        second = [v.nan_to_num(0.0, 0.0, 0.0).sum(0)[:, reads] for v in rows]
        score, mean = torch.einsum("sc,sci->ci", w, s), torch.einsum("sc,sci->ci", w, eta)
        s, off = s - score, eta - mean
        hessian = torch.stack(second, 1) + torch.einsum("sc,sci,scj->cij", w, s, s)
        covariance = torch.einsum("sc,sci,scj->cij", w, off, off)
        values, vectors = torch.linalg.eigh(covariance)
        inverse = (vectors * values.clamp(1e-12, 1.0).reciprocal()[:, None]) @ vectors.mT
        cross = torch.einsum("sc,sci,scj->cij", w, off, s)
        log_l = log_w.logsumexp(0) + torch.linalg.slogdet(root).logabsdet
        return Expansion(log_l, score, hessian, mode, mean, inverse, cross)

    def _mode(self, u: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mode [C, m] of eta given u and y, and a root of the inverse curvature."""
        eta, (clients, m) = near, near.shape
        one, height = torch.eye(m, dtype=u.dtype), torch.full_like(u[:, 0], -torch.inf)
        share, way = torch.ones_like(height), torch.zeros_like(eta)
        best, root = eta, one.expand(clients, m, m)
        done = torch.zeros_like(height, dtype=torch.bool)
        for _ in range(MODES if m else 0):
            eta = (best + share[:, None] * way).requires_grad_()
            with torch.enable_grad():
                value = self._log_likelihood(u[None], eta[None])[0] - 0.5 * eta.square().sum(-1)
                (slope,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
                rows = [
                    torch.autograd.grad(v.sum(), eta, retain_graph=True)[0]
                    for v in slope.unbind(-1)
                ]
            good = ~done & (value.detach() >= height - 1e-12 * height.abs().nan_to_num(posinf=0.0))
            curved = -torch.stack(rows, 1).nan_to_num(0.0, 0.0, 0.0)
            values, vectors = torch.linalg.eigh((curved + curved.mT) / 2)
            # The symmetric root, as eigenvectors may have any sign.
            new_root = (vectors * values.clamp(min=0.1).rsqrt()[:, None]) @ vectors.mT
            new = times(new_root, times(new_root, slope.detach().nan_to_num(0.0, 0.0, 0.0)))
            best = torch.where(good[:, None], eta.detach(), best)
            height = torch.where(good, value.detach(), height)
            root = torch.where(good[:, None, None], new_root, root)
            way = torch.where(good[:, None], new, way)
            share = torch.where(good, 1.0, share / 4)
            done = done | (good & ((new * slope.detach()).sum(-1) < CLOSE)) | (share < 1e-8)
            if bool(done.all()):
                break
        return best, root

    def _log_likelihood(self, u: Tensor, eta: Tensor) -> Tensor:
        """Return log p(y | u, e) [S, C] with the effects e = T eta of the server's T."""
        if self.structure.mixed:
            own = self.structure.evaluate(u, eta, self.batch).roots
            eta = torch.linalg.solve(own, (self.root @ eta[..., None]))[..., 0]
        return self.structure.evaluate(u, eta, self.batch).likelihood


@cache
def rule(m: int) -> tuple[Tensor, Tensor]:
    """Return nodes [S, m] and log weights [S] of integrals over densities, around a normal."""
    if m in NODES:
        x, w = np.polynomial.hermite_e.hermegauss(NODES[m])
        nodes = torch.tensor(list(product(x.tolist(), repeat=m)), dtype=torch.float64)
        weights = torch.tensor(list(product(w.tolist(), repeat=m)), dtype=torch.float64)
        log_weight = weights.log().sum(-1)  # [1] for the one node of no effect
    else:
        nodes = balanced(evenly(1, LATTICE, m, generator("likelihood factors"))[0])
        log_weight = torch.full((LATTICE,), -float(np.log(LATTICE)), dtype=torch.float64)
        log_weight = log_weight + 0.5 * m * float(np.log(2 * np.pi))
    return nodes, log_weight + 0.5 * nodes.square().sum(-1)
