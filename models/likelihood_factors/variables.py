"""Variables of the server's sampler: shared effects between their centered and non-centered form.

The joint density of a shared effect u ~ N(loc, s) and its shared scale s is a funnel if the rows
carry little information on u; that of u / s and s is one if they carry much. The server samples

    w = (u - loc) / s^(1 - c),    c = h s^2 / (1 + h s^2),    h: precision of u in the factors

(Gorinova, Moore and Hoffman, "Automatic Reparameterization of Probabilistic Programs", ICML 2020),
with the median of s. Factors stay normal in u, in which the likelihoods are nearly normal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from pyrofl.inference.hmc import LogDensity, covariance_root
from pyrofl.inference.posteriors.proposals import ModeSearch, ServerDraws
from pyrofl.models.likelihood_factors.captured import CapturedPrior
from pyrofl.models.likelihood_factors.structure import ProgramDensities, Structure
from pyrofl.models.shared.sites import Layout
from pyrofl.tensors import Tensors

MAX_MODE_STEPS, LBFGS_MEMORY = 200, 10  # of the search for the first mode, and its pairs of changes
# Rise of a step that ends the search: the mode is then exact to 1e-12 standard deviations, so that
# searches on a server and in one process, whose sums round differently, end at the same point.
MIN_RISE, MIN_STEP_FRACTION = 1e-24, 1e-12  # and the shortest part of a step
ROUNDING_TOLERANCE = 1e-14  # relative error of a density, by which it may fall
MIN_CURVATURE = 1e-9  # least s'y / y'y of a change of point s and of slope y that is used
MIN_RELATIVE_RISE = 1e-4  # least rise of a step, relative to that of the tangent
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


@dataclass(frozen=True)
class Variables:
    """Change of variables between shared variables u [S, d] and those that are sampled, w [S, d].

    Attributes:
        structure: the hierarchical program.
        prior: the program's prior at points u [S, d], with one client.
        power: exponents c, [d].
    """

    structure: Structure
    prior: CapturedPrior
    power: Tensor

    @classmethod
    def of(cls, structure: Structure, prior: CapturedPrior, u: Tensor, h: Tensor) -> Variables:
        """Choose the exponents, given draws u [S, d] and the precision h [d] of the factors."""
        with torch.no_grad():
            rows = h.clamp(min=0.0) * prior(u).scale[:, 0].median(0).values.square()
        return cls(structure, prior, rows / (1 + rows))

    def start(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [d] of the variables w under the prior."""
        mean, sd = (v.double() for v in self.structure.shared_sites.prior())
        effects = self.structure.effects
        return torch.where(effects, 0.0, mean), torch.where(effects, 1.0, sd)

    def sampled(self, u: Tensor) -> Tensor:
        """Return the variables w [S, d] at u."""
        with torch.no_grad():
            evaluated = self.prior(u)
            w: Tensor = (u - evaluated.loc[:, 0]) / evaluated.scale[:, 0] ** (1 - self.power)
        return w

    def shared(self, w: Tensor) -> tuple[Tensor, ProgramDensities, Tensor]:
        """Return u at w [S, d], the prior there, and the log Jacobian [S]."""
        u, growth = w, torch.ones_like(w)
        for _ in self.structure.scaled_sites:  # scales may be effects themselves
            loc, scale = self.prior.loc_and_scale(u)
            growth = scale[:, 0] ** (1 - self.power)
            before, u = u, loc[:, 0] + growth * w
            if torch.equal(before, u):
                break
        return u, self.prior(u), growth.log().sum(-1)

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
