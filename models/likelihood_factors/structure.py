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

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import base_of, latent, log_prob, observed, per_draw, traces, weighed
from pyrofl.inference.programs import Program
from pyrofl.models.likelihood_factors.noncentered import NonCentered
from pyrofl.models.pvi.declared import Declared
from pyrofl.models.pvi.sites import Layout
from pyrofl.models.pvi.unconstrained import (
    DECENTRED,
    RowsFilled,
    layouts,
    spread_by_others,
    traced,
)
from pyrofl.tensors import Tensors, default_type, generator, matches

POINTS, NEAR = 24, 0.5  # random points, and their distance from the prior's middle, in its sds
EXACT = 1e-6  # relative error of derivatives that count as equal
CLIENTS = 8  # clients whose likelihood is differentiated
ROWS = 16  # largest number of rows of a client whose rows have effects


class OtherStructure(ValueError):
    """A program that likelihood factors cannot fit, and the reason, which names a site."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; use pvi.hierarchical for this program")
        self.reason = reason


class Response(NamedTuple):
    """The only response of a program, if it is normal; [S, C, B] each."""

    mean: Tensor
    sd: Tensor
    value: Tensor
    weight: Tensor  # of the rows, 0 where there is none


class Evaluated(NamedTuple):
    """Log densities of clients' programs at S points, and the roots of their effects."""

    prior: Tensor  # log p(u) of the unconstrained shared variables, [S, C]
    likelihood: Tensor  # log p(y | u, eta), [S, C]
    roots: Tensor  # T, [S, C, m, m]
    response: Response | None
    loc: Tensor  # of the normal priors of `Structure.spread`, else 0, [S, C, d]
    scale: Tensor  # of these, else 1


@dataclass(frozen=True)
class Structure:
    """Hierarchical program with d shared variables u and m standard normal own variables eta.

    Attributes:
        program: the user's program.
        centered: names of the own sites that the program states with a location or a scale.
        ours: layout of the shared sites, unconstrained, [d].
        mine: layout of the own noise, [m].
        powers: exponents c of the shared variables that scale each own variable, [m, d].
        correlated: own site -> shared site that is a root of its correlation matrix.
        reads: indices [p] of the shared variables that the likelihood reads, given the effects.
        mixed: whether any of these enters the roots T, too.
        spread: names of the shared sites that are normal with a scale that is another shared site.
        linear: mask [p] of those that the mean of a normal response is linear in, if the others
            rule its variance alone; None for other likelihoods.
    """

    program: Program
    centered: frozenset[str]
    ours: Layout
    mine: Layout
    powers: Tensor
    correlated: Mapping[str, str] = field(default_factory=dict)
    reads: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    mixed: bool = False
    spread: frozenset[str] = frozenset()
    linear: Tensor | None = None

    @property
    def __name__(self) -> str:
        """Name of the user's program."""
        return getattr(self.program, "__name__", type(self.program).__name__)

    @property
    def effects(self) -> Tensor:
        """Mask [d] of the shared variables whose scale is another one."""
        return torch.cat([(s.mean == s.mean) & (s.name in self.spread) for s in self.ours.sites])

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Run the user's program with its own sites in non-centered form."""
        with RowsFilled(self.mine.sites), NonCentered(self.centered):
            self.program(received, local, batch)

    def evaluate(self, u: Tensor, eta: Tensor, batch: Batch) -> Evaluated:
        """Return log densities and roots at u [S, C, d] and eta [S, C, m], differentiably."""
        handler = NonCentered(self.centered)

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            zero = u.new_zeros(*u.shape[:-1], 1)
            with batch.clients():
                self.ours.sample(u[..., None, :], zero, 1.0)
                self.mine.sample(eta[..., None, :], zero, 0.0, batch.mask.shape[1])

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            with handler:
                self.program(received, local, batch)

        with pyro.validation_enabled(False), default_type(u.dtype):
            q, p = traces(model, guide, {}, {}, batch, len(u))
        zero = u.new_zeros(u.shape[:-1])
        prior, likelihood, values, moments = zero, zero, {}, {}
        for name, site in latent(q):
            if matches(name, self.ours.names):
                values[name] = site["value"]
                prior = prior - per_draw(site["fn"].log_density, len(batch))  # log Jacobian
                stated = p.nodes[name]
                if not isinstance(base_of(stated["fn"]), dist.ImproperUniform):
                    density = weighed(stated, log_prob(name, stated))
                    prior = prior + per_draw(density, len(batch))
                if name in self.spread:
                    base, like = base_of(stated["fn"]), site["value"]
                    moments[name] = [v.expand_as(like).flatten(2) for v in (base.loc, base.scale)]
        for name, site in observed(p):
            likelihood = likelihood + per_draw(weighed(site, log_prob(name, site)), len(batch))
        roots = self._roots(u, values, handler.roots)
        sizes = {s.name: (*u.shape[:-1], len(s.mean)) for s in self.ours.sites}
        none = {name: (u.new_zeros(size), u.new_ones(size)) for name, size in sizes.items()}
        pairs = zip(*({**none, **moments}[name] for name in none), strict=True)
        loc, scale = (
            torch.cat([v.expand(*u.shape[:-1], -1) for v in parts], -1) for parts in pairs
        )
        return Evaluated(prior, likelihood, roots, _response(p, batch), loc, scale)

    def _roots(
        self, u: Tensor, values: Tensors, stated: Mapping[str, tuple[Tensor, bool]]
    ) -> Tensor:
        """Return T [S, C, m, m], given u, values of shared sites, and roots that were stated."""
        scales, parts = (u @ self.powers.to(u).mT).exp(), []
        sizes = [len(site.mean) for site in self.mine.sites]
        for site, scale in zip(self.mine.sites, scales.split(sizes, -1), strict=True):
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


def _response(trace: Any, batch: Batch) -> Response | None:
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


def find_structure(
    program: Program, data: Federation, shared: str, wide: float
) -> tuple[Structure, str]:
    """Return the structure of a program, and a description of its sites.

    Raises:
        OtherStructure: if the program has no such structure.
        ValueError: if a pattern of shared, or the prior of a shared site, is invalid.
    """
    if data.is_outline:
        raise OtherStructure(
            "the clients' rows are not available, which show the structure of a program"
        )
    one, rows = on_cpu(data.batch(torch.tensor([0]))), int(data.sizes.max())
    declared = Declared(program, data, *layouts(program, one, shared, wide, rows=rows))
    declared.check()
    sites = dict(latent(traced(program, one, 3, 1.0)))
    centered = _centered(sites, {site.name for site in declared.mine.sites})
    spread = {s.name for s in declared.ours.sites if spread_by_others(sites[s.name]["fn"])}
    bare = Structure(program, centered, declared.ours, declared.mine, torch.zeros(0, 0))
    ours, mine = layouts(bare, one, shared, wide, rows=rows)
    if mine.of_rows and rows > ROWS:
        name = mine.of_rows[0].removesuffix(DECENTRED)
        raise OtherStructure(
            f"site {name!r} has a value for every row, and a client has {rows} rows; likelihood "
            f"factors take at most {ROWS}"
        )
    powers = torch.zeros(mine.size, ours.size, dtype=torch.float64)
    found = replace(bare, ours=ours, mine=mine, powers=powers, spread=frozenset(spread))
    if not mine.size:
        return replace(found, reads=torch.arange(ours.size)), declared.text()
    _check_roots(found, data)
    some = on_cpu(data.batch(torch.arange(min(CLIENTS, data.clients))))
    found = _reads(_scaled(_correlated(found, some), some), some)
    declared.warn()
    return found, declared.text()


def _centered(sites: Mapping[str, Any], own: set[str]) -> frozenset[str]:
    """Return the own sites that are normal but not standard; OtherStructure for any other."""
    found = set()
    for name in own:
        base = base_of(sites[name]["fn"])
        if isinstance(base, torch.distributions.MultivariateNormal):
            found.add(name)
        elif not isinstance(base, torch.distributions.Normal):
            raise OtherStructure(
                f"site {name!r} of each client is a {type(base).__name__}; likelihood factors need "
                "normal own sites, given the shared ones"
            )
        elif bool((base.loc != 0).any()) or bool((base.scale != 1).any()):
            found.add(name)
    return frozenset(found)


def on_cpu(batch: Batch) -> Batch:
    """Return a batch on the CPU, with floating-point values in double precision."""
    names = ("x", "y", "mask", "size", "ids", "at", "weights")
    known = {n: v for n in names if (v := getattr(batch, n)) is not None}
    moved: dict[str, Any] = {n: precise(v) for n, v in known.items()}
    return replace(batch, **moved)


def precise(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, in double precision if it is of floating point."""
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def blank(batch: Batch) -> Batch:
    """Return a batch of one client with one row of zeros, on which a server runs the prior."""
    one = batch.select_clients(slice(0, 1))
    x, y, mask = (v[:, :1] for v in (one.x, one.y, one.mask))
    none = torch.zeros_like(one.ids)
    return Batch(
        torch.zeros_like(x), torch.zeros_like(y), torch.ones_like(mask), one.size * 0 + 1, none
    )


def random_points(structure: Structure, batch: Batch, *key: int) -> tuple[Tensor, Tensor]:
    """Return random u [S, C, d] near the middle of the prior, and noise eta [S, C, m]."""
    mean, sd = (v.double() for v in structure.ours.prior())
    count = POINTS + 2 * structure.mine.size
    source, clients = generator("likelihood factors", *key), len(batch)
    noise = torch.randn(count, clients, len(mean) + structure.mine.size, generator=source).double()
    u, eta = noise.split([len(mean), structure.mine.size], -1)
    return (mean + NEAR * sd.clamp(max=1.0) * u), eta


def _check_roots(structure: Structure, data: Federation) -> None:
    """Raise OtherStructure if the scale of an own site depends on data or other own sites."""
    both = on_cpu(data.batch(torch.tensor([0, data.clients - 1])))
    u, eta = random_points(structure, both)
    u = u[:, :1].expand_as(u)
    with torch.no_grad():
        found = structure.evaluate(u, eta, both).roots
        other = structure.evaluate(u, eta.flip(0), both).roots
        flipped = replace(both, x=both.x.flip(1), y=both.y.flip(1))
        of_last_row = structure.evaluate(u, eta, flipped).roots
        server = structure.evaluate(u[:, :1], eta[:, :1], blank(both)).roots
    names = ", ".join(site.name.removesuffix(DECENTRED) for site in structure.mine.sites)
    if not torch.allclose(found, other, equal_nan=True):
        raise OtherStructure(f"the scale of {names} depends on another own site")
    alike = torch.allclose(found, of_last_row, equal_nan=True)
    if not alike or not torch.allclose(found, server.expand_as(found)):
        raise OtherStructure(f"the scale of {names} depends on a client's data")


def _slopes(structure: Structure, batch: Batch, *key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return effects e and the slopes of the log likelihood by u and e, [S * C, ...], scaled."""
    u, eta = random_points(structure, batch, *key)
    with torch.no_grad():
        roots = structure.evaluate(u, eta, batch).roots
        e = (roots @ eta[..., None])[..., 0]
    u, e = u.requires_grad_(), e.requires_grad_()
    with torch.enable_grad():
        eta = torch.linalg.solve(structure.evaluate(u, eta, batch).roots, e[..., None])[..., 0]
        total = structure.evaluate(u, eta, batch).likelihood.sum() + 0 * (u.sum() + e.sum())
        of_u, of_e = torch.autograd.grad(total, (u, e))
    size = torch.cat([of_u, of_e * e], -1).abs().amax(-1, keepdim=True)
    size = torch.where(size.isfinite() & (size > 0), size, torch.inf)
    good = (size < torch.inf)[..., 0]
    return e.detach()[good], (of_u / size)[good], (of_e / size)[good]


def _correlated(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the roots of correlation matrices that own noise is rotated by."""
    begin = 0
    for root in structure.ours.sites:
        at, begin = slice(begin, begin + len(root.mean)), begin + len(root.mean)
        k = tuple(root.transform(root.mean.view(root.shape)).shape)
        for site in structure.mine.sites:
            raw = not site.name.endswith(DECENTRED) and not site.plate
            if raw and k == (len(site.mean),) * 2 and site.name not in structure.correlated:
                pairs = {**structure.correlated, site.name: root.name}
                new = replace(structure, correlated=pairs)
                if float(_slopes(new, batch)[1][:, at].detach().abs().max()) < EXACT:
                    structure = new
    return structure


def _scaled(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the powers by which shared variables scale the own noise."""
    if not structure.mine.size:
        return structure
    e, of_u, of_e = (v.detach() for v in _slopes(structure, batch))
    raw = torch.cat(
        [torch.full((len(s.mean),), not s.name.endswith(DECENTRED)) for s in structure.mine.sites]
    )
    growth, powers = e * of_e * raw, structure.powers.clone()
    for i in structure.ours.each("positive").nonzero()[:, 0].tolist():
        found = torch.linalg.lstsq(growth, of_u[:, i : i + 1], driver="gelsd").solution[:, 0]
        left = (growth @ found - of_u[:, i]).abs().max()
        if float(left) < EXACT and float((found - found.round()).abs().max()) < EXACT**0.5:
            powers[:, i] = found.round()
    begin = 0
    for site in structure.mine.sites:
        end = begin + len(site.mean)
        if site.of_rows:  # these clients may have few rows
            powers[begin:end] = powers[begin : begin + len(site.mean) // site.places].repeat(
                site.places, 1
            )
        begin = end
    return replace(structure, powers=powers)


def _reads(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the shared variables that the likelihood reads.

    These are all but those that enter the roots T, and nothing else for these clients.
    """
    _, of_u, _ = _slopes(structure, batch, 1)
    u, eta = random_points(structure, batch)
    u.requires_grad_()
    with torch.enable_grad():
        grown = structure.evaluate(u, eta, batch).roots.square().sum() + 0 * u.sum()
        (of_roots,) = torch.autograd.grad(grown, u)
    scales = of_roots.abs().sum((0, 1)) > 0
    left = of_u.abs().amax(0) < EXACT
    mixed = bool((scales & ~left).any())
    return replace(structure, reads=(~(scales & left)).nonzero()[:, 0], mixed=mixed)
