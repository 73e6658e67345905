"""The latent sites of a program as one vector without constraints, and where its prior puts it.

A normal prior is taken as it is, if its parameters are numbers. Any other is replaced by the normal
with the same median and central 68%, without constraints, of draws from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor
from torch.distributions import biject_to

from pyrofl.data import Batch
from pyrofl.inference.elbo import latent
from pyrofl.inference.loop.noise import ClientNoise, open_latent
from pyrofl.inference.programs import Program
from pyrofl.tensors import Tensors, generator, like, matches

QUANTILES = (0.158655, 0.5, 0.841345)  # of a normal at -1, 0, 1


@dataclass(frozen=True)
class Site:
    """One latent site, and the normal that stands for its prior."""

    name: str
    shape: Size  # without constraints, of m entries
    transform: Any  # from there to the site's values
    mean: Tensor  # [m]
    sd: Tensor  # [m]
    exact: bool  # whether the prior is this normal

    @property
    def positive(self) -> bool:
        """Whether the site is the exponential of what has no constraint."""
        before, after = (self.transform(torch.full(self.shape, v)) for v in (-1.0, 1.0))
        return before.shape == self.shape and torch.allclose(after, before * math.e**2)


@dataclass(frozen=True)
class Layout:
    """Some sites, one after the other in a vector [..., n]."""

    sites: tuple[Site, ...]

    @property
    def size(self) -> int:
        """Number of entries, n."""
        return sum(len(site.mean) for site in self.sites)

    @property
    def names(self) -> str:
        """The sites' names, as a pattern."""
        return " ".join(site.name for site in self.sites)

    def each(self, what: str) -> Tensor:
        """Return "mean", "sd", "exact" or "positive" of every entry, [n]; the latter as 1 or 0."""
        known = (getattr(s, what) + torch.zeros_like(s.mean) for s in self.sites)
        return torch.cat([torch.zeros(0), *known])

    def prior(self) -> tuple[Tensor, Tensor]:
        """Return mean [n] and standard deviation [n] of the normals that stand for the prior."""
        return self.each("mean"), self.each("sd")

    def joined(self, values: Tensors) -> Tensor:
        """Lay values [*p] in one vector [n]."""
        return torch.cat([s.transform.inv(values[s.name]).reshape(-1) for s in self.sites])

    def sample(self, u: Tensor, log_density: Tensor, share: Tensor | float) -> None:
        """State Pyro sample sites, one point u [..., C, 1, n] each.

        The log density [..., C, 1] counts at the first site; the Jacobians, which turn it into a
        density of the sites, count in part.
        """
        sizes = [len(site.mean) for site in self.sites]
        for site, part in zip(self.sites, u.split(sizes, -1), strict=True):
            free = part.reshape(*u.shape[:-1], *site.shape)
            value = site.transform(free)
            growth = site.transform.log_abs_det_jacobian(free, value)
            axes = value.dim() - (u.dim() - 1)
            if growth.dim() >= u.dim():
                growth = growth.flatten(u.dim() - 1).sum(-1)
            density = log_density - share * growth
            pyro.sample(site.name, dist.Delta(value, log_density=density, event_dim=axes))
            log_density = torch.zeros_like(log_density)


def scaling(ours: Layout, mine: Layout) -> Tensor | None:
    """Say by what a client's own variables are scaled, if any are: 1 or 0, [m, d].

    Those with a fixed normal prior, by powers of the positive ones that clients share: there the
    program itself multiplies them, so that what the rows say of z_j depends on g so.
    """
    found = torch.outer(mine.each("exact"), ours.each("positive"))
    return found if bool(found.any()) else None


class _Improper(Messenger):
    """Give sites with an improper prior the middle of their support, as they cannot be drawn.

    Each further draw, along the first axis, may be a step away.
    """

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if open_latent(msg) and isinstance(_base(fn), dist.ImproperUniform):
            transform = _bijection(fn)
            start = torch.zeros(transform.inverse_shape(fn.batch_shape + fn.event_shape))
            away = self.step * torch.arange(len(start))
            msg["value"], msg["done"] = transform(start + like(away, start)), True


class Scaled(Messenger):
    """Let the log densities of some sites count in part."""

    def __init__(self, names: str, share: Tensor) -> None:
        """Keep the sites' names, parted by spaces."""
        super().__init__()
        self.names, self.share = set(names.split()), share

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            msg["scale"] = msg["scale"] * self.share


class Decentred(Messenger):
    """State some normal sites as loc + scale * NAME_decentred, the latter standard normal."""

    def __init__(self, names: set[str]) -> None:
        """Keep the sites' names."""
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.names or not open_latent(msg):
            return
        fn, base = msg["fn"], _base(msg["fn"])
        standard = dist.Normal(torch.zeros_like(base.loc), torch.ones_like(base.scale))
        noise = pyro.sample(f"{msg['name']}_decentred", standard.to_event(fn.event_dim))
        value = base.loc + base.scale * noise
        # As of pyro.deterministic.
        msg["fn"] = dist.Delta(value, event_dim=fn.event_dim).mask(False)
        msg["value"], msg["is_observed"], msg["done"] = value, True, True
        msg["infer"] = {**msg["infer"], "_deterministic": True}


def decentred(program: Program, batch: Batch, shared: str) -> Program:
    """Return a program whose own normal sites have fixed priors, where their scale was random."""
    names = {
        name
        for name, site in latent(_traced(program, batch, 2, step=1.0))
        if not matches(name, shared) and _spread_by_others(site["fn"])
    }

    @wraps(program)
    def stated(received: Tensors, local: Tensors, batch: Batch) -> None:
        with Decentred(names):
            program(received, local, batch)

    return stated if names else program


def layouts(
    program: Program, batch: Batch, shared: str, wide: float, draws: int = 512
) -> tuple[Layout, Layout]:
    """Part a program's latent sites, run on draws of its prior: those to share, and all others.

    An improper prior of real sites has standard deviation `wide`, around 0; that of others 1, as
    for logarithms.
    """
    found = [_look(name, site, wide) for name, site in latent(_traced(program, batch, draws))]
    ours = tuple(s for s in found if matches(s.name, shared))
    if not ours:
        raise ValueError(
            f"shared is {shared!r}; expected patterns of some of {', '.join(s.name for s in found)}"
        )
    return Layout(ours), Layout(tuple(s for s in found if s not in ours))


def _traced(program: Program, batch: Batch, draws: int, step: float = 0.0) -> Any:
    """Run a program on draws of its prior; for `step` see `_Improper`."""
    with (
        pyro.validation_enabled(False),
        torch.no_grad(),
        ClientNoise([generator(0)]),
        _Improper(step),
        pyro.plate("draws", draws, dim=-3),
    ):
        return poutine.trace(program).get_trace({}, {}, batch)


def _spread_by_others(fn: Any) -> bool:
    """Say whether a distribution, under a plate of draws, is a normal with a random scale."""
    base = _base(fn)
    normal = isinstance(base, torch.distributions.Normal)
    return normal and base.scale.dim() > 2 and bool((base.scale != base.scale[:1]).any())


def _look(name: str, site: Any, wide: float) -> Site:
    """Describe a site of a trace under a plate of draws."""
    fn, value = site["fn"], site["value"]
    base = _base(fn)
    plates = {frame.name for frame in site["cond_indep_stack"]}
    if plates != {"clients", "draws"} or fn.support.is_discrete:
        raise ValueError(
            f"site {name!r} is a {type(base).__name__} inside plates {sorted(plates)}; "
            "expected a continuous one inside batch.clients() and no other plate"
        )
    transform = _bijection(fn)
    free = transform.inv(value)
    shape = free.shape[3:]
    flat = free.reshape(-1, shape.numel())
    if isinstance(base, dist.ImproperUniform):
        wide = wide if torch.equal(free, value) else 1.0
        return Site(name, shape, transform, flat[0], torch.full_like(flat[0], wide), False)
    if isinstance(base, torch.distributions.Normal):
        loc, scale = (v.expand(value.shape).reshape(len(flat), -1) for v in (base.loc, base.scale))
        if bool((loc == loc[0]).all() & (scale == scale[0]).all()):
            return Site(name, shape, transform, loc[0].clone(), scale[0].clone(), True)
    low, middle, high = flat.quantile(flat.new_tensor(QUANTILES), 0)
    return Site(name, shape, transform, middle, (high - low) / 2, False)


def _bijection(fn: Any) -> Any:
    """Return the transform to a distribution's support from where there are no constraints."""
    base = _base(fn)
    if isinstance(base, torch.distributions.MixtureSameFamily):  # as its components
        fn = base.component_distribution
    return biject_to(fn.support)


def _base(fn: Any) -> Any:
    """Return a distribution without what is wrapped around it."""
    while isinstance(fn, (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)):
        fn = fn.base_dist
    return fn
