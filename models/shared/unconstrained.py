"""Layouts of a program's latent sites as unconstrained vectors, with moments of the prior.

A normal prior is taken as it is, if its parameters are numbers. Any other is replaced by the normal
with the same median and central 68%, without constraints, of draws from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import base_of, latent
from pyrofl.inference.definition.prior_conversion import Prior, as_prior, nobody
from pyrofl.inference.definition.programs import FREED, NONCENTERED, Program, refuse_subsampling
from pyrofl.inference.definition.rejection import rejecting
from pyrofl.inference.training.noise import ClientNoise, is_unset_latent
from pyrofl.models.shared.places import own_plate
from pyrofl.models.shared.sites import LatentSite, Layout
from pyrofl.nets import Network
from pyrofl.returned import explained
from pyrofl.tensors import (
    Tensors,
    add_trailing_axes,
    default_type,
    generator,
    matches,
    suggest_name,
    unmatched_patterns,
)

CONSTANT_TOLERANCE = 1e-3  # of a log scale less a log variable, in all draws
SCALE = "scale"  # in a site's infer: what a standard normal is multiplied by
QUANTILES = (0.158655, 0.5, 0.841345)  # of a normal at -1, 0, 1


def scaling_mask(shared_sites: Layout, client_sites: Layout) -> Tensor | None:
    """Return a mask [m, d] of the shared variables that scale each client-specific one, or None.

    Own variables are those of the client.

    Those with a fixed normal prior, by powers of the positive ones that clients share: there the
    program itself multiplies them, so that the likelihood of z_j depends on g.
    """
    is_scaled = torch.outer(client_sites.each("exact"), shared_sites.each("positive"))
    return is_scaled if bool(is_scaled.any()) else None


class _Improper(Messenger):
    """Pyro handler that sets sites with an improper prior to the middle of their support.

    Each further draw, along the first axis, may be a step away.
    """

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if is_unset_latent(msg) and isinstance(base_of(fn), dist.ImproperUniform):
            transform = _bijection(fn)
            start = torch.zeros(transform.inverse_shape(fn.batch_shape + fn.event_shape))
            away = self.step * torch.arange(len(start))
            msg["value"], msg["done"] = transform(start + add_trailing_axes(away, start)), True


class Scaled(Messenger):
    """Pyro handler that scales the log densities of named sites; a scale of None removes them."""

    def __init__(self, names: str, share: Tensor | None) -> None:
        super().__init__()
        self.names, self.share = set(names.split()), share

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names and self.share is None:
            msg["mask"] = False  # which spares its computation, too
        elif msg["name"] in self.names:
            msg["scale"] = msg["scale"] * self.share


class NonCentered(Messenger):
    """Pyro handler that writes normal sites as loc + scale * NAME_noncentered."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.names or not is_unset_latent(msg):
            return
        fn, base = msg["fn"], base_of(msg["fn"])
        standard = dist.Normal(torch.zeros_like(base.loc), torch.ones_like(base.scale))
        standard = standard.to_event(fn.event_dim)
        if isinstance(fn, dist.MaskedDistribution):
            standard = standard.mask(fn._mask)
        scale: Any = {SCALE: base.scale.expand(base.batch_shape)}
        noise = pyro.sample(msg["name"] + NONCENTERED, standard, infer=scale)
        as_deterministic(msg, base.loc + base.scale * noise)


def noncentered(program: Program, batch: Batch) -> Program:
    """Return the Pyro program with its normal sites of random scale in non-centered form."""
    names = {
        name
        for name, site in latent(trace_prior(program, batch, 2, step=1.0))
        if spread_by_others(site["fn"])
    }

    @wraps(program)
    def stated(received: Tensors, local: Tensors, batch: Batch) -> None:
        with NonCentered(names):
            program(received, local, batch)

    return stated if names else program


class Unconstrained(dist.TransformedDistribution):  # type: ignore[misc]
    """Distribution of the unconstrained value of a site, given its distribution."""

    def __init__(self, fn: Any) -> None:
        self.bijection = _bijection(fn)
        super().__init__(fn, [self.bijection.inv])

    def expand(self, batch_shape: Any, _instance: Any = None) -> Unconstrained:
        """Return the distribution expanded to another batch shape."""
        return Unconstrained(self.base_dist.expand(batch_shape))


class Freed(Messenger):
    """Pyro handler that writes sites as functions of NAME_unconstrained, which has real values."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.names or not is_unset_latent(msg):
            return
        fn, mask = msg["fn"], None
        if isinstance(fn, dist.MaskedDistribution):
            fn, mask = fn.base_dist, fn._mask
        free = Unconstrained(fn)
        value = pyro.sample(msg["name"] + FREED, free if mask is None else free.mask(mask))
        as_deterministic(msg, free.bijection(value))


def with_real_values(program: Program, data: Federation) -> Program:
    """Return the Pyro program with real values of sites whose support depends on others or data."""
    names = frozenset(with_own_support(program, data))

    @wraps(program)
    def stated(received: Tensors, local: Tensors, batch: Batch) -> None:
        with Freed(names):
            program(received, local, batch)

    return stated if names else program


def with_own_support(program: Program, data: Federation) -> list[str]:
    """Return the sites whose support depends on other sites, or on a client's data."""
    both = data.batch(torch.tensor([0, data.clients - 1]).unique())
    seen = latent(trace_prior(program, both, 2, step=1.0))
    return [name for name, site in seen if has_own_support(site)]


def has_own_support(site: Any) -> bool:
    """Return whether the support of a traced site differs between draws, clients or rows."""
    if site["fn"].support.is_discrete:
        return False
    transform, axes = _bijection(site["fn"]), len(site["fn"].batch_shape)
    first = transform.inv(site["value"])[(slice(1),) * axes]
    return bool(transform(first).shape[:axes].numel() > 1)


def as_deterministic(msg: Any, value: Tensor) -> None:
    """Give a site's message a value, as `pyro.deterministic` does."""
    msg["fn"] = dist.Delta(value, event_dim=msg["fn"].event_dim).mask(False)
    msg["value"], msg["is_observed"], msg["done"] = value, True, True
    msg["infer"] = {**msg["infer"], "_deterministic": True}


def name_of(name: str) -> str:
    """Return the name in the user's program of a site that the library may have transformed."""
    return name.removesuffix(NONCENTERED).removesuffix(FREED)


class _Filled(dist.MaskedDistribution):
    """Prior of a latent site over rows, with a normal approximation for masked rows."""

    def __init__(self, fn: Any, hidden: Tensor, site: LatentSite) -> None:
        super().__init__(fn, ~hidden)  # type: ignore[no-untyped-call]
        self.hidden, self.site = hidden, site

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Filled:
        """Return the distribution expanded to another batch shape."""
        return _Filled(self.base_dist.expand(batch_shape), self.hidden, self.site)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of each row, by a normal approximation for masked rows."""
        log_density, standing = self.base_dist.log_prob(value), self.site.stand_in_at(value)
        return torch.where(self.hidden, standing, log_density)


class RowsFilled(Messenger):
    """Pyro handler that gives masked rows of latent sites a normal prior."""

    def __init__(self, sites: Iterable[LatentSite]) -> None:
        super().__init__()
        self.sites = {site.name: site for site in sites if site.of_rows}

    def _pyro_sample(self, msg: Any) -> None:
        if (site := self.sites.get(msg["name"])) and not msg["is_observed"]:
            fn, mask = msg["fn"], torch.as_tensor(msg["mask"] is None or msg["mask"])
            if isinstance(fn, dist.MaskedDistribution):
                fn, mask = fn.base_dist, mask & fn._mask
            msg["fn"], msg["mask"] = _Filled(fn, ~mask, site), None


def with_hidden_rows(program: Program, client_sites: Layout) -> Program:
    """Return the Pyro program with a normal prior for masked rows of its latent sites."""

    @wraps(program)
    def stated(received: Tensors, local: Tensors, batch: Batch) -> None:
        with RowsFilled(client_sites.sites):
            program(received, local, batch)

    return stated if client_sites.of_rows else program


def layouts(
    program: Program, batch: Batch, shared: str, improper_sd: float, draws: int = 512, rows: int = 1
) -> tuple[Layout, Layout]:
    """Return vector layouts of a program's shared and other latent sites, from prior draws.

    An improper prior of real sites has standard deviation `wide`, around 0; that of others 1, as
    for logarithms. A site of rows has as many places as the longest client has `rows`.
    """
    trace = trace_prior(program, batch, draws)
    for name, node in trace.nodes.items():
        refuse_subsampling(name, node)
    seen = dict(latent(trace))
    if not seen:
        raise ValueError("the program has no latent site; give the unknowns priors by pyro.sample")
    sites = [_look(name, site, improper_sd, rows) for name, site in seen.items()]
    names = [name_of(site.name) for site in sites]
    shared_sites = tuple(s for s, n in zip(sites, names, strict=True) if matches(n, shared))
    if not shared_sites:
        raise ValueError(
            f"shared is {shared!r}, which matches no latent site; expected names or patterns of "
            f"some of {', '.join(names)}, separated by spaces, such as {names[0]!r} or '*'"
        )
    for pattern in unmatched_patterns(shared, names):
        raise ValueError(
            f"{pattern!r} in shared matches no latent site; {suggest_name(pattern, names)}"
        )
    for site in shared_sites:
        if site.of_rows:
            raise ValueError(
                f"site {site.name!r} is inside batch.rows(), and shared matches it; expected it to "
                "be each client's own, as every row has one of its own"
            )
    client_sites = tuple(s for s in sites if s not in shared_sites)
    return Layout(
        tuple(replace(s, scales=_scales(seen, s, shared_sites)) for s in shared_sites)
    ), Layout(client_sites)


def _scales(
    seen: Mapping[str, Any], site: LatentSite, shared_sites: tuple[LatentSite, ...]
) -> Tensor | None:
    """Return the index of the shared variable that scales each site entry, [m]; -1 for none."""
    if SCALE not in seen[site.name]["infer"]:
        return None
    scale = seen[site.name]["infer"][SCALE].log().flatten(1)  # [S, m or 1]
    scale, start = scale.expand(len(scale), len(site.mean)), 0
    indices = torch.full_like(site.mean, -1, dtype=torch.long)
    for other in shared_sites:
        if other.positive:
            log = seen[other.name]["value"].log().flatten(1)
            for i, one in enumerate(log.T):
                gap = scale - one[:, None]
                indices[(gap - gap[0]).abs().amax(0) < CONSTANT_TOLERANCE] = start + i
        start += len(other.mean)
    return indices if bool((indices >= 0).any()) else None


def of_network(
    net: Network, prior: Prior, improper_sd: float, shared: str = "*"
) -> tuple[Layout, Layout]:
    """Return vector layouts of a network's shared and other parameters.

    Raises:
        ValueError: if the prior fits no parameters, or reads what the server sends.
    """
    prior_of = as_prior(prior, net.shapes, may_be_learned=False)

    def drawn(received: Tensors, local: Tensors, data: Batch) -> None:
        """Sample all parameters of the network from their prior."""
        with data.clients():
            for n, shape in net.shapes.items():
                pyro.sample(n, prior_of(n, shape, received, local, data))

    return layouts(drawn, nobody(), shared, improper_sd, draws=64)


def trace_prior(program: Program, batch: Batch, draws: int, step: float = 0.0) -> Any:
    """Run a Pyro program on draws of its prior and return the trace; for `step` see `_Improper`."""
    tracer: Any = poutine.trace(program)
    with (
        _in_one_line(tracer),
        rejecting(),
        pyro.validation_enabled(False),
        torch.no_grad(),
        default_type(batch.size.dtype),
        ClientNoise([generator(0) for _ in range(len(batch))]),
        _Improper(step),
        pyro.plate("draws", draws, dim=-3),
    ):
        return tracer.get_trace({}, {}, batch)


@contextmanager
def _in_one_line(tracer: Any) -> Iterator[None]:
    """Convert errors of a model to one-line ValueErrors that name the last site and the cause."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        if "; expected" in first:  # a line of ours
            raise ValueError(first) from error
        sites = [n for n, node in tracer.trace.nodes.items() if node["type"] == "sample"]
        after = f" after site {sites[-1]!r}" if sites else ""
        raise ValueError(f"the model fails{after}: {explained(error)}") from error


def spread_by_others(fn: Any) -> bool:
    """Return whether a distribution is a normal with a random scale, under a plate of draws."""
    base = base_of(fn)
    normal = isinstance(base, torch.distributions.Normal)
    return normal and base.scale.dim() > 2 and bool((base.scale != base.scale[:1]).any())


def _look(name: str, site: Any, improper_sd: float, rows: int) -> LatentSite:
    """Return the description of a traced latent site: transform, plate, approximate prior."""
    fn, value = site["fn"], site["value"]
    own, places = own_plate(name, site)
    transform = _bijection(fn)
    free = transform.inv(value)
    shape = free.shape[3:]
    # All rows have one prior, that of the first client's; places of another plate each their own.
    entries, again = (shape.numel(), rows) if own == "rows" else (places * shape.numel(), 1)
    mean, sd, exact = _stand_in(base_of(fn), value, free, entries, improper_sd)
    return LatentSite(
        name, shape, transform, mean.repeat(again), sd.repeat(again), exact, own, places * again
    )


def _stand_in(
    base: Any, value: Tensor, free: Tensor, entries: int, improper_sd: float
) -> tuple[Tensor, Tensor, bool]:
    """Return mean and sd of a prior's normal approximation, and whether it is exact."""
    flat = free.reshape(-1, entries)  # [points, entries]
    if bool((is_finite := flat.isfinite().all(-1)).any()):  # others are of rejected points
        flat = flat[is_finite]
    if isinstance(base, dist.ImproperUniform):
        improper_sd = improper_sd if torch.equal(free, value) else 1.0
        return flat[0], torch.full_like(flat[0], improper_sd), False
    if isinstance(base, torch.distributions.Normal):
        loc, scale = (v.expand(value.shape).reshape(len(flat), -1) for v in (base.loc, base.scale))
        if bool((loc == loc[0]).all() & (scale == scale[0]).all()):
            return loc[0].clone(), scale[0].clone(), True
    low, middle, high = flat.quantile(flat.new_tensor(QUANTILES), 0)
    return middle, (high - low) / 2, False


def _bijection(fn: Any) -> Any:
    """Return the transform from unconstrained values to a distribution's support."""
    base = base_of(fn)
    if isinstance(base, torch.distributions.MixtureSameFamily):  # as its components
        fn = base.component_distribution
    return biject_to(fn.support)
