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

are those of the factor (Louis, "Finding the Observed Information Matrix when Using the EM
Algorithm", JRSS B 1982, has the identities). Nodes of the expectations are those of Gauss and
Hermite around the mode of eta, or, for more than two effects, a lattice with weights.

Where log L plus the log cavity is not concave at the cavity's mean, it may have several maxima. The
client then searches from two more points, on both sides of the mean in the direction of the most
positive curvature, takes the highest maximum, and reports whether it has found another one. It
searches in the same way for several modes of eta.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.rejection import rejecting
from pyrofl.inference.posteriors.proposals import normal_lattices
from pyrofl.models.likelihood_factors.predictors import Derivatives, Predictors
from pyrofl.models.likelihood_factors.single_effects import sum_single_effects
from pyrofl.models.likelihood_factors.structure import OtherStructure, Structure
from pyrofl.models.shared.gaussians import balance_noise
from pyrofl.tensors import Tensors, add_trailing_axes, generator, times

NODES = {0: (1, 1), 1: (5, 21), 2: (3, 11)}  # per effect: to find a maximum, and at the maximum
LATTICE = 32, 128  # of more effects, in all
MAX_NEWTON_STEPS, MAX_MODE_STEPS = 40, 40  # Newton steps at most, by u and by eta
NEWTON_TOLERANCE = 1e-16  # Newton decrement that ends them
COARSE_TOLERANCE = 1e-3  # the same by a coarse rule, for a starting point
MAX_AUTOMATIC_VARIABLES = 3  # variables of which automatic derivatives are as fast as closed ones
MAX_SQUARED = 30  # variables of which all products [S, p p] fit into the cache
MANY_CLIENTS = 200  # from which gradients are computed in closed form
MAX_ROUNDING_ERROR = 10.0  # rounding error of a log density that excludes it
EXACT_DIGITS = 1e-12  # pivot that is exact to some digits, relative to its diagonal of A
# Negative curvature of log L that is kept, relative to that of the cavity.
MAX_NEGATIVE_CURVATURE = 0.5
UNKNOWN = (
    "the likelihood of a client is 0, not finite or without derivatives at all points searched, "
    "which are near the posterior given the other clients: check its rows and the program"
)
MAX_UNKNOWN_WEIGHT = 1e-6  # weight of nodes without derivatives
# Distance in sds, and log density, of a second maximum that counts.
MIN_MODE_DISTANCE, MAX_MODE_DEPTH = 4.0, 10.0


def integrate(u: Tensor, root: Tensor, noise: Tensor, factors: Tensors) -> Tensor:
    """Return log t(u, T) [S, J] of J factors.

    Args:
        u: the p shared variables that likelihoods read, [S, p].
        root: T, [S, m, m].
        noise: inverse noise variance of linear models, which multiplies P and h; else 1, [S].
        factors: shift h [J, p + m], precision P [J, p + m, p + m]; and of linear models square and
            count [J], see `linear`.
    """
    return without_effects(u, noise, factors) + eliminate_effects(u, root, noise, factors)


def log_product(u: Tensor, root: Tensor, noise: Tensor, factors: Tensors) -> Tensor:
    """Return the log product [S] of J factors; the arguments are those of `integrate`."""
    sums = {name: part.sum(0, keepdim=True) for name, part in factors.items()}
    p = u.shape[-1]
    if root.shape[-1] == 1 and len(factors["shift"]) >= MANY_CLIENTS:
        row, scale = factors["precision"][:, p], root[:, 0, 0] * noise.sqrt()
        effects = sum_single_effects(u, scale, noise, factors["shift"][:, p], row)
        effects = torch.where(effects.isnan(), -torch.inf, effects)
    else:
        effects = eliminate_effects(u, root, noise, factors).sum(-1)
    total: Tensor = without_effects(u, noise, sums)[:, 0] + effects
    if "square" not in factors:
        return total
    # Both terms are as large as the squares over the noise variance, and cancel each other: where
    # that loses all digits, as for a tiny noise, errors are not to look like a high density.
    error = noise * sums["square"][0] * torch.finfo(total.dtype).eps
    return torch.where(error > MAX_ROUNDING_ERROR, -torch.inf, total)


def without_effects(u: Tensor, noise: Tensor, factors: Tensors) -> Tensor:
    """Return log t(u, 0) [S, J], as `integrate` for effects e = 0; it is linear in the factors."""
    p, shift, precision = u.shape[-1], factors["shift"], factors["precision"]
    if p > MAX_SQUARED:
        square = torch.einsum("si,jik->sjk", u, precision[:, :p, :p]) @ u[:, :, None]  # [S, J, 1]
        value = u @ shift[:, :p].mT - 0.5 * square[..., 0]
    else:
        squares = (u[:, :, None] * u[:, None]).flatten(1)  # [S, p p]
        value = u @ shift[:, :p].mT - 0.5 * squares @ precision[:, :p, :p].flatten(1).mT
    if "count" not in factors:
        return value
    value = noise[:, None] * (value - 0.5 * factors["square"])
    return value + 0.5 * noise.log()[:, None] * factors["count"]


def eliminate_effects(u: Tensor, root: Tensor, noise: Tensor, factors: Tensors) -> Tensor:
    """Return b' A^-1 b / 2 - log det A / 2 [S, J], by elimination of one effect after the other.

    Whole tensors [S, J] are many times as fast as small matrices one by one. Where effects have
    huge and nearly collinear roots, differences of A lose all digits: such a density is 0.
    """
    a, b = normal_equations(u, root, noise, factors)
    value = u.new_zeros(len(u), len(factors["shift"]))
    least = EXACT_DIGITS * a.diagonal().detach()  # [S, J, m]
    for i in range(len(b)):
        scale = torch.where(a[0, 0] > least[..., i], a[0, 0], torch.nan).rsqrt()
        column, first = a[1:, 0] * scale, b[0] * scale  # [m - 1, S, J], [S, J]
        value = value + 0.5 * first.square() + scale.log()
        a, b = a[1:, 1:] - column[:, None] * column, b[1:] - column * first
    return torch.where(value.isnan(), -torch.inf, value)


def normal_equations(
    u: Tensor, root: Tensor, noise: Tensor, factors: Tensors
) -> tuple[Tensor, Tensor]:
    """Return A [m, m, S, J] and b [m, S, J]; the arguments are those of `integrate`."""
    p, shift, precision = u.shape[-1], factors["shift"], factors["precision"]
    scaled, m = root * noise.sqrt()[:, None, None], root.shape[-1]
    # Two operands each, as einsum searches for an order of more at every call.
    half = torch.einsum("jil,slm->jism", precision[:, p:, p:], scaled)
    a = torch.einsum("sik,jism->kmsj", scaled, half)
    across = precision[:, p:, :p].flatten(0, 1)  # [J m, p]
    pull = shift[:, p:] - (u @ across.mT).unflatten(1, (len(shift), m))  # [S, J, m]
    return a + torch.eye(m).to(a)[:, :, None, None], torch.einsum(
        "sik,sji->ksj", root * noise[:, None, None], pull
    )


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
    predictors: Predictors | None = None  # of the batch, if they are linear

    def update(self) -> Tensors:
        """Return shift [C, n] and precision [C, n, n] of the factors, and where they are exact.

        Also return whether a client has found a second maximum, [C].

        Raises:
            OtherStructure: if clients have found no point with a likelihood and its derivatives.
        """
        self = self._replace(predictors=self._predictors())
        start, several = self._starts()
        several |= self._several_modes(self.u.index_copy(1, self.structure.reads, start))
        at, expansion = self._climb(start, self.root.new_zeros(self.root.shape[:-1]), False)
        at, expansion = self._climb(at, expansion.mode, True)
        moments = {"mean": self.u.index_copy(1, self.structure.reads, at)}
        if bool((unknown := ~expansion.value.isfinite()).any()):
            positions = unknown.nonzero().flatten().tolist()
            raise OtherStructure(UNKNOWN, self.batch.ids[unknown].tolist(), positions)
        return self._stated(at, expansion) | moments | {"multimodal": several.to(at)}

    def _starts(self) -> tuple[Tensor, Tensor]:
        """Return where to search for the highest maximum [C, p], and whether there are several."""
        mean, none = self.u[:, self.structure.reads], self.root.new_zeros(self.root.shape[:-1])
        several = torch.zeros(len(mean), dtype=torch.bool)
        if not mean.shape[1]:
            return mean, several
        first = self._expand(mean, none, False)
        lower, values, vectors = self._relative_curvature(first)
        curved = values[:, 0] < -1
        if not bool(curved.any()):
            return mean, several
        way = torch.linalg.solve_triangular(lower.mT, vectors[:, :, :1], upper=True)[..., 0]
        way = torch.where(curved[:, None], way, 0.0)
        maxima, heights, precisions = [], [], []
        for start in (mean, mean + way, mean - way):
            at, expansion = self._climb(start, none, False)
            off = at - mean
            maxima.append(at)
            heights.append(expansion.value - 0.5 * (off * times(self.precision, off)).sum(-1))
            precisions.append(self.precision - expansion.hessian)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            off, near = maxima[i] - maxima[j], (heights[i] - heights[j]).abs() < MAX_MODE_DEPTH
            for precision in (precisions[i], precisions[j]):
                near = near & ((off * times(precision, off)).sum(-1) > MIN_MODE_DISTANCE**2)
            several = several | (near & curved)
        best = (
            torch.stack([heights[0] + COARSE_TOLERANCE, *heights[1:]])
            .nan_to_num(nan=-torch.inf)
            .argmax(0)
        )
        highest = torch.stack(maxima)[best, torch.arange(len(mean))]
        return torch.where(curved[:, None], highest, mean), several

    def _climb(self, at: Tensor, near: Tensor, fine: bool) -> tuple[Tensor, Expansion]:
        """Return the maximum of L(u) times the cavity, [C, p], and the expansion there.

        The score by a coarse rule is not the derivative of its value, as the nodes depend on u.
        Steps by it soon gain nothing, so that they end earlier.
        """
        tolerance, least = (NEWTON_TOLERANCE, 1e-8) if fine else (COARSE_TOLERANCE, 1e-2)
        off = at - self.u[:, self.structure.reads]
        best = self._expand(at, near, fine)
        height = best.value - 0.5 * (off * times(self.precision, off)).sum(-1)
        share = torch.ones_like(height)
        done = torch.zeros_like(share, dtype=torch.bool)
        for _ in range(MAX_NEWTON_STEPS):
            slope = best.score - times(self.precision, off)
            lower, values, vectors = self._relative_curvature(best)
            basis = torch.linalg.solve_triangular(lower.mT, vectors, upper=True)
            size = 1 + values.clamp(min=-MAX_NEGATIVE_CURVATURE)  # minus the Hessian in this basis
            way = times(basis, times(basis.mT, slope) / size)
            # The step from a point within the tolerance is made, as its error is the square of it.
            is_last = (slope * way).sum(-1) < tolerance
            done = done | (share < least)
            if bool(done.all()):
                break
            new = at + torch.where(done, 0.0, share)[:, None] * way
            there = self._expand(new, best.mode, fine)
            far = off + new - at
            level = there.value - 0.5 * (far * times(self.precision, far)).sum(-1)
            good = (level >= height - 1e-9 * height.abs()) & ~done
            at, height = torch.where(good[:, None], new, at), torch.where(good, level, height)
            off = torch.where(good[:, None], far, off)
            best = Expansion(
                *(
                    torch.where(add_trailing_axes(good, a), a, b)
                    for a, b in zip(there, best, strict=True)
                )
            )
            share = torch.where(good, 1.0, share / 4)
            done = done | is_last
        return at, best

    def _curvature(self, expansion: Expansion) -> Tensor:
        """Return minus the Hessian of log L [C, p, p], bounded below relative to the cavity."""
        lower, values, vectors = self._relative_curvature(expansion)
        half = lower @ vectors
        bounded: Tensor = (half * values.clamp(min=-MAX_NEGATIVE_CURVATURE)[:, None]) @ half.mT
        return bounded

    def _relative_curvature(self, expansion: Expansion) -> tuple[Tensor, Tensor, Tensor]:
        """Return a root of the cavity's precision, and minus the Hessian of log L relative to it.

        The latter are eigenvalues [C, p] in ascending order, and eigenvectors [C, p, p].
        """
        lower = torch.linalg.cholesky(self.precision)
        inner = torch.linalg.solve_triangular(lower, -expansion.hessian, upper=False)
        inner = torch.linalg.solve_triangular(lower, inner.mT, upper=False)
        return lower, *torch.linalg.eigh((inner + inner.mT) / 2)

    def _stated(self, at: Tensor, expansion: Expansion) -> Tensors:
        """Return the factor with the derivatives and moments of an expansion at `at`."""
        one = torch.eye(self.root.shape[-1], dtype=self.root.dtype)
        back = torch.linalg.inv(self.root).mT  # from eta to e
        of_e = back @ (expansion.inverse - one) @ back.mT  # [C, m, m]
        across = -back @ expansion.inverse @ expansion.cross  # [C, m, p]
        mean = times(self.root, expansion.mean)
        explained = expansion.cross.mT @ expansion.inverse @ expansion.cross  # P_ue Cov(e) P_eu
        of_u = self._curvature(expansion) + explained  # [C, p, p]
        shift_e = times(back @ expansion.inverse, expansion.mean) + times(across, at)
        shift_u = expansion.score + times(of_u, at) + times(across.mT, mean)
        top, bottom = torch.cat([of_u, across.mT], -1), torch.cat([across, of_e], -1)
        return {
            "shift": torch.cat([shift_u, shift_e], -1),
            "precision": torch.cat([top, bottom], -2),
        }

    def _expand(self, at: Tensor, near: Tensor, fine: bool) -> Expansion:
        """Return the expansion of the clients' log marginal likelihoods at `at` [C, p]."""
        reads, m = self.structure.reads, self.root.shape[-1]
        u = self.u.index_copy(1, reads, at)
        mode, root, _ = self._mode(u, near)
        nodes, log_weight = rule(m, fine)
        inner = torch.einsum("cij,sj->sci", root, nodes.to(u))  # [S, C, m]
        eta = mode + inner
        u = u.expand(len(nodes), -1, -1)
        exact = self.predictors and self.predictors.derivatives_at(u[..., reads], eta)
        value, slopes, second = self._closed(exact) if exact else self._automatic(u, eta)
        log_w = value - 0.5 * eta.square().sum(-1) + log_weight.to(u)[:, None]  # [S, C]
        log_w = log_w.nan_to_num(nan=-torch.inf)
        w = log_w.softmax(0).nan_to_num(0.0)
        curved = second(w)
        s = slopes.nan_to_num(0.0, 0.0, 0.0)
        score, mean = torch.einsum("sc,sci->ci", w, s), torch.einsum("sc,sci->ci", w, eta)
        s, off = s - score, eta - mean
        hessian = curved + torch.einsum("sc,sci,scj->cij", w, s, s)
        covariance = torch.einsum("sc,sci,scj->cij", w, off, off)
        values, vectors = torch.linalg.eigh(covariance)
        inverse = (vectors * values.clamp(1e-12, 1.0).reciprocal()[:, None]) @ vectors.mT
        cross = torch.einsum("sc,sci,scj->cij", w, off, s)
        log_l = log_w.logsumexp(0) + torch.linalg.slogdet(root).logabsdet
        unknown = (w * slopes.isnan().any(-1)).sum(0)
        log_l = torch.where(unknown > MAX_UNKNOWN_WEIGHT, torch.nan, log_l)
        return Expansion(log_l, score, hessian, mode, mean, inverse, cross)

    def _closed(self, exact: Derivatives) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return log likelihoods [S, C], scores [S, C, p], and a function of weights [S, C].

        The function returns the weighted sums of Hessians [C, p, p].
        """
        some = slice(0, len(self.structure.reads))
        return exact.log_likelihood, exact.score(some), partial(exact.hessian, some=some)

    def _automatic(
        self, u: Tensor, eta: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return what `_closed` does, by automatic differentiation, at any u [S, C, d] and eta."""
        u, reads = u.clone().requires_grad_(), self.structure.reads
        with torch.enable_grad():
            value = self._log_likelihood(u, eta)
            (slopes,) = torch.autograd.grad(value.sum(), u, create_graph=True)

        def second(w: Tensor) -> Tensor:
            """Return the weighted sums [C, p, p] of the second derivatives of log likelihoods."""
            with torch.enable_grad():
                rows = [
                    torch.autograd.grad(
                        (w * slopes[..., i]).sum(), u, retain_graph=True, materialize_grads=True
                    )[0]
                    for i in reads.tolist()
                ]
            curved = [v.nan_to_num(0.0, 0.0, 0.0).sum(0)[:, reads] for v in rows]  # [C, p] each
            return torch.stack(curved, 1) if curved else u.new_zeros(u.shape[1], 0, 0)

        return value.detach(), slopes.detach()[..., reads], second

    def _several_modes(self, u: Tensor) -> Tensor:
        """Return whether eta has several modes given u and y, [C]."""
        middle = self.root.new_zeros(self.root.shape[:-1])
        _, _, curved = self._of_effects(u, middle)
        values, vectors = torch.linalg.eigh(curved)
        bent: Tensor = (values < 0).any(-1)
        if not bool(bent.any()):
            return bent
        way = torch.where(bent[:, None], 2 * vectors[:, :, 0], 0.0)
        (one, root, high), (other, _, low) = (self._mode(u, start) for start in (way, -way))
        with rejecting():
            apart = torch.linalg.solve(root, (one - other)[..., None])[..., 0]
        several: Tensor = (high - low).abs() < MAX_MODE_DEPTH
        several &= bent & (apart.square().sum(-1) > MIN_MODE_DISTANCE**2)
        return several

    def _of_effects(self, u: Tensor, eta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(y, eta | u) [C], its gradient [C, m], and minus its Hessian [C, m, m]."""
        reads, p = self.structure.reads, len(self.structure.reads)
        if exact := self.predictors and self.predictors.derivatives_at(
            u[None][..., reads], eta[None]
        ):
            value = exact.log_likelihood[0] - 0.5 * eta.square().sum(-1)
            slope = exact.score(slice(p, None))[0].nan_to_num(0.0, 0.0, 0.0)
            second = exact.hessian(torch.ones_like(exact.log_likelihood), slice(p, None))
            return value, slope - eta, torch.eye(eta.shape[-1]).to(eta) - second
        eta = eta.detach().requires_grad_()
        with torch.enable_grad():
            value = self._log_likelihood(u[None], eta[None])[0] - 0.5 * eta.square().sum(-1)
            (slope,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
            rows = [
                torch.autograd.grad(v.sum(), eta, retain_graph=True)[0] for v in slope.unbind(-1)
            ]
        curved = -torch.stack(rows, 1) if rows else slope.new_zeros(*eta.shape, 0)
        curved = curved.nan_to_num(0.0, 0.0, 0.0)
        return value.detach(), slope.detach().nan_to_num(0.0, 0.0, 0.0), (curved + curved.mT) / 2

    def _mode(self, u: Tensor, near: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mode [C, m] of eta, a root of the inverse curvature, and the height [C]."""
        eta, (clients, m) = near, near.shape
        one, height = torch.eye(m, dtype=u.dtype), torch.full_like(u[:, 0], -torch.inf)
        share, way = torch.ones_like(height), torch.zeros_like(eta)
        best, root = eta, one.expand(clients, m, m)
        done = torch.zeros_like(height, dtype=torch.bool)
        for _ in range(MAX_MODE_STEPS if m else 0):
            eta = best + share[:, None] * way
            value, slope, curved = self._of_effects(u, eta)
            good = ~done & (value >= height - 1e-12 * height.abs().nan_to_num(posinf=0.0))
            values, vectors = torch.linalg.eigh(curved)
            # The symmetric root, as eigenvectors may have any sign.
            new_root = (vectors * values.clamp(min=0.1).rsqrt()[:, None]) @ vectors.mT
            new = times(new_root, times(new_root, slope))
            best = torch.where(good[:, None], eta, best)
            height = torch.where(good, value, height)
            root = torch.where(good[:, None, None], new_root, root)
            way = torch.where(good[:, None], new, way)
            share = torch.where(good, 1.0, share / 4)
            done = done | (good & ((new * slope).sum(-1) < NEWTON_TOLERANCE)) | (share < 1e-8)
            if bool(done.all()):
                break
        return best, root, height

    def _log_likelihood(self, u: Tensor, eta: Tensor) -> Tensor:
        """Return log p(y | u, e) [S, C] with the effects e = T eta of the server's T."""
        return self.structure.evaluate(u, self._noise(u, eta), self.batch).likelihood

    def _noise(self, u: Tensor, eta: Tensor) -> Tensor:
        """Return the noise [S, C, m] of the program at u that has the effects of eta under T."""
        if not self.structure.mixed:
            return eta
        own = self.structure.evaluate(u, eta, self.batch).roots
        with rejecting():
            noise: Tensor = torch.linalg.solve(own, (self.root @ eta[..., None]))[..., 0]
        return noise

    def _predictors(self) -> Predictors | None:
        """Return the linear predictors of the clients' responses, if they are linear."""
        at, m = self.u[:, self.structure.reads], self.root.shape[-1]

        def whole(at: Tensor) -> Tensor:
            u = self.u.expand(len(at), *self.u.shape)  # [S, C, d]
            return u.index_copy(2, self.structure.reads, at)

        def run(at: Tensor, eta: Tensor) -> object:
            u = whole(at)
            return self.structure.run(u, self._noise(u, eta), self.batch)[1]

        def automatic(at: Tensor, eta: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                v = torch.cat([at, eta], -1).requires_grad_()  # [S, C, p + m]
                value = self._log_likelihood(whole(v[..., : at.shape[-1]]), v[..., at.shape[-1] :])
                (score,) = torch.autograd.grad(value.sum(), v, create_graph=True)
                rows = [
                    torch.autograd.grad(part.sum(), v, retain_graph=True, materialize_grads=True)[0]
                    for part in (score @ directions).unbind(-1)
                ]
            return score.detach(), torch.stack(rows, -1)  # [S, C, p + m, k]

        return (
            Predictors.of(run, at, m, automatic) if at.shape[1] > MAX_AUTOMATIC_VARIABLES else None
        )


@cache
def rule(m: int, fine: bool) -> tuple[Tensor, Tensor]:
    """Return nodes [S, m] and log weights [S] of integrals over densities, around a normal."""
    if m in NODES:
        x, w = np.polynomial.hermite_e.hermegauss(NODES[m][fine])
        nodes, weights = (
            torch.tensor(list(product(v.tolist(), repeat=m)), dtype=torch.float64).view(
                len(v) ** m, m
            )
            for v in (x, w)
        )
        log_weight = weights.log().sum(-1)
    else:
        count = LATTICE[fine]
        nodes = balance_noise(normal_lattices(1, count, m, generator("likelihood factors"))[0])
        log_weight = torch.full((count,), -float(np.log(count)), dtype=torch.float64)
        log_weight = log_weight + 0.5 * m * float(np.log(2 * np.pi))
    return nodes, log_weight + 0.5 * nodes.square().sum(-1)
