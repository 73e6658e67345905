"""Variables of the server's sampler: shared effects, standardized given their loc and scale.

The joint density of a shared effect u ~ N(loc, s) and its shared scale s is a funnel if the rows
carry little information on u; that of u / s and s is one if they carry much. The server samples

    w = L' (u - loc) / s - L^-1 s (c - H loc),    L L' = 1 + s H s

which is standard normal for all loc and s, if the factors are exp(c' u - u' H u / 2) in u. So w is
between u and (u - loc) / s, which Gorinova, Moore and Hoffman, "Automatic Reparameterization of
Probabilistic Programs", ICML 2020, choose for the middle of s: the scales of a Gaussian process
vary by orders of magnitude with its length scale. c and H are those of the factors at the middle of
the other variables; the density of w has the factors themselves, so that draws are exact. Entries
are standardized one by one if H is nearly diagonal, or large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.hmc import LogDensity, covariance_root
from pyrofl.inference.posteriors.proposals import ModeSearch, ServerDraws
from pyrofl.models.likelihood_factors.captured import CapturedPrior
from pyrofl.models.likelihood_factors.structure import ProgramDensities, Structure
from pyrofl.models.shared.sites import Layout
from pyrofl.tensors import Tensors, times

MAX_MODE_STEPS, LBFGS_MEMORY = 200, 10  # of the search for the first mode, and its pairs of changes
# Rise of a step that ends the search: the mode is then exact to 1e-12 standard deviations, so that
# searches on a server and in one process, whose sums round differently, end at the same point.
MIN_RISE, MIN_STEP_FRACTION = 1e-24, 1e-12  # and the shortest part of a step
ROUNDING_TOLERANCE = 1e-14  # relative error of a density, by which it may fall
MIN_CURVATURE = 1e-9  # least s'y / y'y of a change of point s and of slope y that is used
MIN_RELATIVE_RISE = 1e-4  # least rise of a step, relative to that of the tangent
# Correlation of two effects in the factors below which each is standardized by itself, and largest
# number of effects that are not, as each step factorizes a matrix for each chain.
MIN_CORRELATION, MAX_JOINT = 0.2, 50
MAX_FLIPPED = 20  # at most as many sites change signs by two, and as many entries one by one
MAX_SCANNED = 20  # at most as many variables are changed one by one
# Sds of the prior, and of the draws, between which they are changed.
PRIOR_RANGE, DRAW_RANGE = 3.0, 3.0
NUM_LINEAR_POINTS, NUM_GEOMETRIC_POINTS = 24, 8  # points on each side


def find_mode(log_density: LogDensity, start: Tensor) -> Tensor:
    """Return the mode [1, d] of a log density from a start [d], with gradients.

    By L-BFGS (Nocedal and Wright, "Numerical Optimization", 2006, algorithm 7.4) with steps that
    are shortened until the density rises, also where it is 0. Not by `torch.optim.LBFGS`, whose
    constructor imports torch's compiler, which takes seconds.
    """
    at, (value, slope) = start[None], _with_slope(log_density, start[None])
    pairs: deque[tuple[Tensor, Tensor]] = deque(maxlen=LBFGS_MEMORY)
    for _ in range(MAX_MODE_STEPS):
        way = _direction(slope, pairs)
        rise, share = float((way * slope).sum()), 1.0
        if not rise > MIN_RISE:
            break
        new, (height, there) = at, (value, slope)
        while share > MIN_STEP_FRACTION:
            new = at + share * way
            height, there = _with_slope(log_density, new)
            if height >= value + MIN_RELATIVE_RISE * share * rise - ROUNDING_TOLERANCE * abs(value):
                break
            share /= 2
        else:
            break
        change, bend = new - at, slope - there
        if float((change * bend).sum()) > MIN_CURVATURE * float(bend.square().sum()):
            pairs.append((change, bend))
        at, value, slope = new, height, there
    return at.detach().requires_grad_()


def _with_slope(log_density: LogDensity, at: Tensor) -> tuple[float, Tensor]:
    """Return a log density at a point [1, d] and its gradient; -inf where it is not finite."""
    at = at.detach().requires_grad_()
    with torch.enable_grad():
        value = log_density(at).sum() + 0 * at.sum()  # it may be constant
        (slope,) = torch.autograd.grad(value, at)
    finite = bool(value.isfinite() & slope.isfinite().all())
    return (float(value.detach()) if finite else -torch.inf), slope.nan_to_num(0.0, 0.0, 0.0)


def _direction(slope: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the direction of ascent [1, d] of L-BFGS, given pairs of changes of point and slope.

    The first has a length of at most 1.
    """
    if not pairs:
        first: Tensor = slope / slope.norm().clamp(min=1.0)
        return first
    way, weights = slope, []
    for change, bend in reversed(pairs):
        weight = (change * way).sum() / (change * bend).sum()
        weights.append(weight)
        way = way - weight * bend
    change, bend = pairs[-1]
    way = way * (change * bend).sum() / bend.square().sum()
    for (change, bend), weight in zip(pairs, reversed(weights), strict=True):
        way = way + (weight - (bend * way).sum() / (change * bend).sum()) * change
    return way


def curvature(log_density: LogDensity, at: Tensor) -> Tensor:
    """Return minus the Hessian [d, d] of a log density at a point [1, d]; 0 where it has none."""
    at = at.detach().requires_grad_()
    with torch.enable_grad():
        value = log_density(at).sum() + 0 * at.square().sum()  # it may be linear
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        rows = [torch.autograd.grad(v, at, retain_graph=True)[0] for v in slope[0]]
    return -torch.cat(rows).nan_to_num(0.0, 0.0, 0.0)


class Effects(NamedTuple):
    """Entries of a site of shared effects, and the normal exp(c' u - u' H u / 2) of the factors.

    Attributes:
        at: places of the entries.
        shift: c, [k].
        precision: H, [k, k], or its diagonal [k] if entries are standardized one by one.
    """

    at: slice
    shift: Tensor
    precision: Tensor

    @classmethod
    def of(cls, at: slice, slope: Tensor, precision: Tensor, middle: Tensor) -> Effects:
        """Return entries of a site, given slope [d] and curvature [d, d] of the factors there."""
        h, u = precision[at, at], middle[at]
        diagonal = h.diagonal().clamp(min=0.0)
        correlation = h / torch.outer(diagonal, diagonal).sqrt().clamp(min=1e-300)
        if len(u) > MAX_JOINT or not bool((correlation.tril(-1).abs() > MIN_CORRELATION).any()):
            return cls(at, slope[at] + diagonal * u, diagonal)
        values, vectors = torch.linalg.eigh((h + h.mT) / 2)
        h = (vectors * values.clamp(min=0.0)) @ vectors.mT
        return cls(at, slope[at] + h @ u, h)

    def sampled(self, u: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        """Return w [S, k] of effects u [S, k], given loc and scale [S, k] of their prior."""
        lower, mean = self._normal(loc, scale)
        off = (u - loc) / scale
        return (lower * off if lower.dim() == 2 else times(lower.mT, off)) - mean

    def shared(self, w: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return effects u [S, k] of w [S, k], and the log Jacobian [S]."""
        lower, mean = self._normal(loc, scale)
        if lower.dim() == 2:
            off, diagonal = (w + mean) / lower, lower
        else:
            off = torch.linalg.solve_triangular(lower.mT, (w + mean)[..., None], upper=True)[..., 0]
            diagonal = lower.diagonal(dim1=-2, dim2=-1)
        return loc + scale * off, (scale / diagonal).log().sum(-1)

    def _normal(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return L [S, k, k], or its diagonal [S, k], and L^-1 s (c - H loc) [S, k]."""
        if self.precision.dim() == 1:
            lower = (1 + self.precision * scale.square()).sqrt()
            return lower, scale * (self.shift - self.precision * loc) / lower
        inner = scale[..., None] * self.precision * scale[:, None]
        lower = torch.linalg.cholesky_ex(torch.eye(len(self.shift)).to(inner) + inner).L
        slope = scale * (self.shift - loc @ self.precision)
        return lower, torch.linalg.solve_triangular(lower, slope[..., None], upper=False)[..., 0]


@dataclass(frozen=True)
class Variables:
    """Change of variables between shared variables u [S, d] and those that are sampled, w [S, d].

    Attributes:
        structure: the hierarchical program.
        prior: the program's prior at points u [S, d], with one client.
        effects: of each site of shared effects.
    """

    structure: Structure
    prior: CapturedPrior
    effects: tuple[Effects, ...]

    @classmethod
    def of(
        cls, structure: Structure, prior: CapturedPrior, log_factors: LogDensity, middle: Tensor
    ) -> Variables:
        """Return the variables for the log product of factors, of u [S, d], near u [d]."""
        if not structure.scaled_sites:
            return cls(structure, prior, ())
        slope = _with_slope(log_factors, middle[None])[1][0]
        normal = slope, curvature(log_factors, middle[None]), middle
        return cls(structure, prior, tuple(Effects.of(at, *normal) for at in structure.effects))

    @classmethod
    def non_centered(cls, structure: Structure, prior: CapturedPrior) -> Variables:
        """Return the variables for constant factors."""
        middle = structure.shared_sites.prior()[0].double()
        return cls.of(structure, prior, lambda u: 0 * u.sum(-1), middle)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [d] of the variables w under the prior."""
        mean, sd = (v.double() for v in self.structure.shared_sites.prior())
        for one in self.effects:
            mean[one.at], sd[one.at] = 0.0, 1.0
        return mean, sd

    def sampled(self, u: Tensor) -> Tensor:
        """Return the variables w [S, d] at u."""
        w = u.clone()
        with torch.no_grad():
            loc, scale = (v[:, 0] for v in self.prior.loc_and_scale(u))
            for one in self.effects:
                w[:, one.at] = one.sampled(*(v[:, one.at] for v in (u, loc, scale)))
        return w

    def shared(self, w: Tensor) -> tuple[Tensor, ProgramDensities, Tensor]:
        """Return u at w [S, d], the prior there, and the log Jacobian [S]."""
        if not self.effects:
            return w, self.prior(w), torch.zeros_like(w[:, 0])
        moments = self.prior.loc_and_scale(w)
        for _ in self.effects:  # loc and scale of effects may be other effects
            u, growth = self._shared(w, *moments)
            evaluated = self.prior(u)
            before, moments = moments, (evaluated.loc, evaluated.scale)
            if all(torch.equal(*pair) for pair in zip(before, moments, strict=True)):
                break
        return u, evaluated, growth

    def _shared(self, w: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return u at w [S, d], given loc and scale [S, 1, d] of effects, and the log Jacobian."""
        u, growth = w, torch.zeros_like(w[:, 0])
        for one in self.effects:
            part, more = one.shared(*(v[:, one.at] for v in (w, loc[:, 0], scale[:, 0])))
            u = u.slice_scatter(part, 1, one.at.start, one.at.stop)
            growth = growth + more
        return u, growth

    def standardized(
        self,
        u: Tensor,
        log_density: Tensor,
        listed_at: Callable[[Tensor, ProgramDensities], tuple[Tensors, Tensor]],
    ) -> ServerDraws:
        """Return draws u [S, d] and their log density [S] as noise of the variables w.

        `listed_at` returns a server state with other draws u [S, d], where the prior is as given,
        and their log density.
        """
        w = self.sampled(u)
        mean, root = w.mean(0), covariance_root(w)

        def at(noise: Tensor) -> tuple[Tensors, Tensor]:
            with torch.no_grad():
                u, evaluated, growth = self.shared(mean + noise @ root.mT)  # [S, d]
                server, value = listed_at(u, evaluated)
            return server, value + growth

        def noise_of(w: Tensor) -> Tensor:
            """Return variables w [S, d] as noise."""
            noise: Tensor = torch.linalg.solve_triangular(root, (w - mean).mT, upper=False).mT
            return noise

        with torch.no_grad():
            growth = self.shared(w)[2]
        best, layout = u[log_density.argmax()], self.structure.shared_sites
        paths = mirror_images(layout, best) + changed_one_by_one(layout, best, u.std(0))
        points = torch.cat([best[None], *(points for _, points in paths)])
        if len(points) % 2:  # the middle of a list is its mean
            points = torch.cat([points, best[None]])
        lengths = [(change, len(points)) for change, points in paths]
        search = ModeSearch(noise_of(self.sampled(points)), lengths) if paths else None
        return ServerDraws(noise_of(w), log_density + growth, at, search)


def mirror_images(layout: Layout, u: Tensor) -> list[tuple[str, Tensor]]:
    """Return paths of `ModeSearch` from shared variables u [d] to their mirror images, [2, d] each.

    Signs are changed of each site, each two, all sites, and each entry. Positive variables keep
    theirs, as they are logarithms here. Sites of equal sizes and supports exchange their values.
    """
    parts = torch.arange(len(u)).split([len(site.mean) for site in layout.sites])
    places = {site.name: part for site, part in zip(layout.sites, parts, strict=True)}
    names = [(a,) for a in places] + [tuple(places)]
    if len(places) <= MAX_FLIPPED:
        names += combinations(places, 2)
    changed = {" and ".join(some): torch.cat([places[n] for n in some]) for some in names}
    if len(u) <= MAX_FLIPPED:
        changed |= {f"{n}[{i}]": at[i : i + 1] for n, at in places.items() for i in range(len(at))}
    masks: dict[tuple[bool, ...], str] = {}
    for name, at in changed.items():
        mask = torch.zeros(len(u), dtype=torch.bool).index_fill(0, at, True)
        mask &= (layout.each("positive") == 0) & (u != 0)
        if bool(mask.any()):
            masks.setdefault(tuple(mask.tolist()), name)
    images = []
    for values, name in masks.items():
        flipped = torch.tensor(values, dtype=u.dtype)
        path = torch.stack([u * (1 - flipped), u * (1 - 2 * flipped)])
        images.append((f"{name} has the other sign", path))
    kinds = {site.name: (len(site.mean), type(site.transform)) for site in layout.sites}
    for one, other in combinations(places, 2) if len(places) <= MAX_FLIPPED else ():
        if kinds[one] == kinds[other]:
            image = u.clone()
            image[places[one]], image[places[other]] = u[places[other]], u[places[one]]
            path = torch.stack([(u + image) / 2, image])
            images.append((f"{one} and {other} exchange their values", path))
    return images


def changed_one_by_one(layout: Layout, u: Tensor, sd: Tensor) -> list[tuple[str, Tensor]]:
    """Return paths of `ModeSearch` on which one of the shared variables u [d] moves over its prior.

    Args:
        layout: of the shared variables.
        u: of the draw.
        sd: standard deviations of the draws, [d].
    """
    if len(u) > MAX_SCANNED:
        return []
    sizes = [len(site.mean) for site in layout.sites]
    names = [
        f"{site.name}[{i}]" if size > 1 else site.name
        for site, size in zip(layout.sites, sizes, strict=True)
        for i in range(size)
    ]
    mean, wide = (v.double() for v in layout.prior())
    changes = []
    for i, name in enumerate(names):
        begin = DRAW_RANGE * float(sd[i])
        for sign in (-1, 1):
            length = sign * float(mean[i] + sign * PRIOR_RANGE * wide[i] - u[i])
            if length <= begin:
                continue
            steps = (
                (torch.arange(NUM_LINEAR_POINTS, dtype=u.dtype) + 1) / NUM_LINEAR_POINTS * length
            )
            near = (
                torch.logspace(0, 1, NUM_GEOMETRIC_POINTS, base=length / begin, dtype=u.dtype)
                * begin
            )
            off = torch.cat([steps[steps > begin], near]).sort().values
            path = u.repeat(len(off), 1)
            path[:, i] += sign * off
            changes.append((f"{name} is far from its draws", path))
    return changes
