"""Structure of a hierarchical program: effects e = T(g) eta, and what the likelihood reads.

All own sites of a client are standard normal noise eta, and enter the likelihood as e = T(g) eta
with a root T(g) of their covariance. In a centered program, z ~ Normal(loc, scale), T is the scale
of the site. In a non-centered one T is found by derivatives of the log likelihood l(g, eta): the
positive shared variable s scales eta_i with the power c_i if, for all g and eta,

    dl / d log s = sum_i c_i eta_i dl / d eta_i

and a root R of a correlation matrix belongs to T if l does not depend on it, given R eta.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import (
    base_of,
    latent,
    log_prob,
    observed,
    per_draw,
    traces,
    weighed,
)
from pyrofl.inference.definition.programs import Program
from pyrofl.models.likelihood_factors.noncentered import NonCenteredRoots
from pyrofl.models.shared.matrices import to_cpu_double
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import RowsFilled
from pyrofl.returned import ClientError
from pyrofl.tensors import Tensors, default_type, generator, matches

# Random points, and their distance from the prior's middle, in its sds.
NUM_POINTS, POINT_DISTANCE = 24, 0.5
DERIVATIVE_TOLERANCE = 1e-6  # relative error of derivatives that count as equal
NUM_CHECKED_CLIENTS = 8  # clients whose likelihood is differentiated


class OtherStructure(ClientError):
    """A program that likelihood factors cannot fit, and the reason, which names a site."""

    def __init__(
        self, reason: str, clients: Sequence[int] = (), positions: Sequence[int] = ()
    ) -> None:
        super().__init__(f"{reason}; use pvi.hierarchical for this program", clients, positions)
        self.reason = reason


class Response(NamedTuple):
    """The only response of a program, if it is normal; [S, C, B] each."""

    mean: Tensor
    sd: Tensor
    value: Tensor
    weight: Tensor  # of the rows, 0 where there is none


class ProgramDensities(NamedTuple):
    """Log densities of clients' programs at S points, and the roots of their effects."""

    prior: Tensor  # log p(u) of the unconstrained shared variables, [S, C]
    likelihood: Tensor  # log p(y | u, eta), [S, C]
    roots: Tensor  # T, [S, C, m, m]
    response: Response | None
    loc: Tensor  # of the normal priors of `scaled_sites`, else 0, [S, C, d]
    scale: Tensor  # of these, else 1


@dataclass(frozen=True)
class Structure:
    """Hierarchical program with d shared variables u and m standard normal own variables eta.

    Attributes:
        program: the user's program.
        centered: names of the own sites that the program states with a location or a scale.
        shared_sites: layout of the shared sites, unconstrained, [d].
        client_sites: layout of the own noise, [m].
        powers: exponents c of the shared variables that scale each own variable, [m, d].
        correlated: own site -> shared site that is a root of its correlation matrix.
        reads: indices [p] of the shared variables that the likelihood reads, given the effects.
        mixed: whether any of these enters the roots T, too.
        scaled_sites: names of the shared sites that are normal with a scale that depends on others.
        linear: mask [p] of those that the mean of a normal response is linear in, if the others
            rule its variance alone; all True if it is known; None for other likelihoods.
    """

    program: Program
    centered: frozenset[str]
    shared_sites: Layout
    client_sites: Layout
    powers: Tensor
    correlated: Mapping[str, str] = field(default_factory=dict)
    reads: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    mixed: bool = False
    scaled_sites: frozenset[str] = frozenset()
    linear: Tensor | None = None

    @property
    def __name__(self) -> str:
        """Name of the user's program."""
        return getattr(self.program, "__name__", type(self.program).__name__)

    @property
    def effects(self) -> list[slice]:
        """Places in u of the sites in `scaled_sites`."""
        parts, begin = [], 0
        for site in self.shared_sites.sites:
            end = begin + len(site.mean)
            if site.name in self.scaled_sites:
                parts.append(slice(begin, end))
            begin = end
        return parts

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Run the user's program with its own sites in non-centered form."""
        with RowsFilled(self.client_sites.sites), NonCenteredRoots(self.centered):
            self.program(received, local, batch)

    def run(self, u: Tensor, eta: Tensor, batch: Batch) -> tuple[Any, Any, NonCenteredRoots]:
        """Run the program at u [S, C, d] and eta [S, C, m].

        Return Pyro's traces of u and eta and of the program, and the roots that it states.
        """
        handler = NonCenteredRoots(self.centered)

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            zero = u.new_zeros(*u.shape[:-1], 1)
            with batch.clients():
                self.shared_sites.sample(u[..., None, :], zero, 1.0)  # [S, C, 1, d]
                self.client_sites.sample(eta[..., None, :], zero, 0.0, batch.mask.shape[1])

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            with handler:
                self.program(received, local, batch)

        with pyro.validation_enabled(False), default_type(u.dtype):
            return *traces(model, guide, {}, {}, batch, len(u)), handler

    def evaluate(self, u: Tensor, eta: Tensor, batch: Batch) -> ProgramDensities:
        """Return log densities and roots at u [S, C, d] and eta [S, C, m], differentiably."""
        q, p, handler = self.run(u, eta, batch)
        zero = u.new_zeros(u.shape[:-1])
        prior, likelihood, values, moments = zero, zero, {}, {}
        for name, site in latent(q):
            if matches(name, self.shared_sites.names):
                values[name] = site["value"]
                prior = prior - per_draw(site["fn"].log_density, len(batch))  # log Jacobian
                stated = p.nodes[name]
                if not isinstance(base_of(stated["fn"]), dist.ImproperUniform):
                    density = weighed(stated, log_prob(name, stated))
                    prior = prior + per_draw(density, len(batch))
                if name in self.scaled_sites:
                    base, like = base_of(stated["fn"]), site["value"]
                    moments[name] = [v.expand_as(like).flatten(2) for v in (base.loc, base.scale)]
        with pyro.validation_enabled(False):  # no response may be 0, as of the server's blank row
            for name, site in observed(p):
                value = weighed(site, log_prob(name, site))
                likelihood = likelihood + per_draw(value, len(batch))
        roots = self.roots(u, values, handler.roots)
        sizes = {s.name: (*u.shape[:-1], len(s.mean)) for s in self.shared_sites.sites}
        none = {name: (u.new_zeros(size), u.new_ones(size)) for name, size in sizes.items()}
        pairs = zip(*({**none, **moments}[name] for name in none), strict=True)
        loc, scale = (
            torch.cat([v.expand(*u.shape[:-1], -1) for v in parts], -1) for parts in pairs
        )
        return ProgramDensities(prior, likelihood, roots, response_of(p, batch), loc, scale)

    def trace(self, values: Tensors, batch: Batch, points: int) -> tuple[Any, NonCenteredRoots]:
        """Run the program at values [S, C, 1, *p] of its shared sites, without own noise.

        Return Pyro's trace, and the roots of own sites that the program states.
        """
        handler = NonCenteredRoots(self.centered)
        none = next(iter(values.values())).new_zeros(points, len(batch), 1)

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            with batch.clients():
                for name, value in values.items():
                    pyro.sample(name, dist.Delta(value, event_dim=value.dim() - 3))
                eta = none[..., None].expand(-1, -1, -1, self.client_sites.size)  # [S, C, 1, m]
                self.client_sites.sample(eta, none, 0.0, batch.mask.shape[1])

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            with handler:
                self.program(received, local, batch)

        with pyro.validation_enabled(False), default_type(none.dtype):
            return traces(model, guide, {}, {}, batch, points)[1], handler

    def roots(
        self, u: Tensor, values: Tensors, stated: Mapping[str, tuple[Tensor, bool]]
    ) -> Tensor:
        """Return T [S, C, m, m], given u, values of shared sites, and roots that were stated."""
        scales, parts = (u @ self.powers.to(u).mT).exp(), []
        sizes = [len(site.mean) for site in self.client_sites.sites]
        for site, scale in zip(self.client_sites.sites, scales.split(sizes, -1), strict=True):
            root = torch.diag_embed(scale)
            if site.name in self.correlated:
                root = root @ values[self.correlated[site.name]].squeeze(2)
            if site.name in stated:
                own, matrix = stated[site.name]
                shape = own.shape[-1 - len(site.shape) - matrix :]
                own = own.expand(*u.shape[:-1], *shape)
                if site.of_rows:  # all have the scale of the first
                    own = own[:, :, :1].expand(*u.shape[:-1], site.places, *shape[1:])
                root = torch.diag_embed(own.movedim(2, -1) if matrix else own.flatten(2))
                if matrix:  # [S, C, k, k, places, places]
                    root = root.permute(0, 1, 4, 2, 5, 3)
                    root = root.reshape(*u.shape[:-1], len(site.mean), len(site.mean))
            parts.append(root)
        return _block_diagonal(parts, u)


def response_of(trace: Any, batch: Batch) -> Response | None:
    """Return the response of a program's trace, or None if it is not normal."""
    sites = [site for _, site in observed(trace)]
    if len(sites) != 1 or not isinstance(base_of(sites[0]["fn"]), torch.distributions.Normal):
        return None
    (site,), base = sites, base_of(sites[0]["fn"])
    weight = weighed(site, torch.ones_like(batch.mask, dtype=base.loc.dtype))
    if isinstance(site["fn"], dist.MaskedDistribution):
        weight = torch.where(torch.as_tensor(site["fn"]._mask), weight, 0.0)
    if site["fn"].event_dim or base.loc.shape[-1] != batch.mask.shape[1]:
        return None
    return Response(base.loc, base.scale, site["value"].to(base.loc), weight)


def _block_diagonal(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return matrices [S, C, m, m] with the given blocks [S, C, k, k] on the diagonal."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.shape[-1] for part in parts]
    rows, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        rows.append(torch.nn.functional.pad(part, (begin, sum(sizes) - begin - size)))
        begin += size
    return torch.cat(rows, -2) if rows else like.new_zeros(*like.shape[:-1], 0, 0)


def on_cpu(batch: Batch) -> Batch:
    """Return a batch on the CPU, with floating-point values in double precision."""
    names = ("x", "y", "mask", "size", "ids", "at", "weights")
    tensors = {n: v for n in names if (v := getattr(batch, n)) is not None}
    moved: dict[str, Any] = {n: to_cpu_double(v) for n, v in tensors.items()}
    return replace(batch, **moved)


def blank(batch: Batch) -> Batch:
    """Return a batch of one client with one row of zeros, on which a server runs the prior."""
    one = batch.select_clients(slice(0, 1))
    x, y, mask = (v[:, :1] for v in (one.x, one.y, one.mask))
    rows = torch.zeros_like(x), torch.zeros_like(y), torch.ones_like(mask)
    nobody = one.size * 0 + 1, torch.zeros_like(one.ids)
    return Batch(*rows, *nobody, features=batch.features)


def random_points(
    structure: Structure, batch: Batch, *key: int, count: int = 0
) -> tuple[Tensor, Tensor]:
    """Return random u [S, C, d] near the middle of the prior, and noise eta [S, C, m]."""
    mean, sd = (v.double() for v in structure.shared_sites.prior())
    count = count or NUM_POINTS + 2 * structure.client_sites.size
    source, clients = generator("likelihood factors", *key), len(batch)
    noise = torch.randn(
        count, clients, len(mean) + structure.client_sites.size, generator=source
    ).double()
    u, eta = noise.split([len(mean), structure.client_sites.size], -1)
    return (mean + POINT_DISTANCE * sd.clamp(max=1.0) * u), eta
