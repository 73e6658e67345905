"""The latent sites of a program as one vector without constraints, and where its prior puts it."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from pyrofl.tensors import Tensors, generator, matches

QUANTILES = (0.158655, 0.5, 0.841345)  # of a normal at -1, 0, 1


@dataclass(frozen=True)
class Site:
    """One latent site, and the normal that stands for its prior.

    Attributes:
        name: of the site.
        shape: without constraints.
        transform: from there to the site's values.
        mean: [m], the shape flattened.
        sd: [m].
        exact: whether the prior is this normal.
    """

    name: str
    shape: Size
    transform: Any
    mean: Tensor
    sd: Tensor
    exact: bool

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
        """Return a yes or no of the sites for every entry: 1 or 0, [n]."""
        known = [torch.full_like(s.mean, float(getattr(s, what))) for s in self.sites]
        return torch.cat(known) if known else torch.zeros(0)

    def prior(self) -> tuple[Tensor, Tensor]:
        """Return mean [n] and standard deviation [n] of the normals that stand for the prior."""
        if not self.sites:
            return torch.zeros(0), torch.zeros(0)
        return torch.cat([s.mean for s in self.sites]), torch.cat([s.sd for s in self.sites])

    def joined(self, values: Tensors) -> Tensor:
        """Lay values [*p] in one vector [n]."""
        return torch.cat([s.transform.inv(values[s.name]).reshape(-1) for s in self.sites])

    def sample(self, u: Tensor, log_density: Tensor, share: Tensor | float) -> None:
        """State Pyro sample sites, one point each.

        Args:
            u: [..., C, 1, n].
            log_density: [..., C, 1], of u; it counts at the first site.
            share: of the Jacobians, which turn it into a density of the sites.
        """
        for site, part in zip(
            self.sites, u.split([len(s.mean) for s in self.sites], -1), strict=True
        ):
            free = part.reshape(*u.shape[:-1], *site.shape)
            value = site.transform(free)
            growth = site.transform.log_abs_det_jacobian(free, value)
            axes = value.dim() - (u.dim() - 1)
            if growth.dim() >= u.dim():
                growth = growth.flatten(u.dim() - 1).sum(-1)
            density = log_density - share * growth
            pyro.sample(site.name, dist.Delta(value, log_density=density, event_dim=axes))
            log_density = torch.zeros_like(log_density)


class _Improper(Messenger):
    """Give sites with an improper prior the middle of their support, as they cannot be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        if open_latent(msg) and isinstance(_base(msg["fn"]), dist.ImproperUniform):
            fn = msg["fn"]
            transform = _bijection(fn)
            start = transform.inverse_shape(fn.batch_shape + fn.event_shape)
            msg["value"] = transform(torch.zeros(start))
            msg["done"] = True
            self.found.add(msg["name"])


def layouts(
    program: Program, batch: Batch, shared: str, wide: float, draws: int = 512
) -> tuple[Layout, Layout]:
    """Look at a program's latent sites: those that clients share, and those of each client.

    A normal prior is taken as it is, if its parameters are numbers. Any other is replaced by the
    normal with the same median and central 68%, without constraints, of draws from it.

    Args:
        program: the model; it is run on draws of its own prior.
        batch: rows of one client.
        shared: patterns of shared sites.
        wide: standard deviation for an improper prior of real sites, around 0; that of others is 1,
            as for logarithms.
        draws: of the prior.

    Raises:
        ValueError: if no site is shared, or one is discrete or not right inside `batch.clients()`.
    """
    improper = _Improper()
    with (
        pyro.validation_enabled(False),
        torch.no_grad(),
        ClientNoise([generator(0)]),
        improper,
        pyro.plate("draws", draws, dim=-3),
    ):
        trace = poutine.trace(program).get_trace({}, {}, batch)
    found = [
        _look(name, site, draws, wide if name in improper.found else None)
        for name, site in latent(trace)
    ]
    ours = tuple(s for s in found if matches(s.name, shared))
    if not ours:
        raise ValueError(
            f"shared is {shared!r}; expected patterns of some of {', '.join(s.name for s in found)}"
        )
    return Layout(ours), Layout(tuple(s for s in found if s not in ours))


def _look(name: str, site: Any, draws: int, wide: float | None) -> Site:
    """Describe a site of a trace under a plate of draws."""
    fn, value = site["fn"], site["value"]
    plates = {frame.name for frame in site["cond_indep_stack"]}
    if plates != {"clients", "draws"} or fn.support.is_discrete:
        raise ValueError(
            f"site {name!r} is a {type(_base(fn)).__name__} inside plates {sorted(plates)}; "
            "expected a continuous one inside batch.clients() and no other plate"
        )
    transform = _bijection(fn)
    free = transform.inv(value)
    shape = free.shape[3:]
    flat = free.reshape(-1, shape.numel())
    if wide is not None:
        wide = wide if torch.equal(free, value) else 1.0
        return Site(name, shape, transform, flat[0], torch.full_like(flat[0], wide), False)
    base = _base(fn)
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
