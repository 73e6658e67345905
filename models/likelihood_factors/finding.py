"""Search for the structure of a hierarchical program, and its check at each client's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import base_of, latent
from pyrofl.inference.definition.programs import NONCENTERED, Program
from pyrofl.models.likelihood_factors.linear import has_constant_noise, is_linear, with_linear_mask
from pyrofl.models.likelihood_factors.simulated import simulated, unsuitable
from pyrofl.models.likelihood_factors.structure import (
    DERIVATIVE_TOLERANCE,
    NUM_CHECKED_CLIENTS,
    OtherStructure,
    Structure,
    blank,
    on_cpu,
    random_points,
)
from pyrofl.models.shared.declared import Declared
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import (
    layouts,
    name_of,
    spread_by_others,
    trace_prior,
    with_own_support,
)
from pyrofl.user_warnings import warn_user

MAX_ROWS_WITH_EFFECTS = 16  # largest number of rows of a client whose rows have effects
PRIOR_FRACTIONS = (1e-3, 1e-6, 1e-9)  # parts of the prior in which a likelihood may be curved
MAX_SEARCHES = 4  # for a structure that no client's rows contradict
CHECKED_AT_ONCE = 64  # clients
NUM_CHECKED_POINTS = 4  # random points at which each client checks the structure


def find_structure(
    program: Program, data: Federation, shared: str, improper_sd: float
) -> tuple[Structure, str]:
    """Return the structure of a program, and a description of its sites.

    It is found from rows of the first clients and of clients with rows that contradict theirs, such
    as those with another value of a covariate, or, of an outline, from simulated rows.

    Raises:
        OtherStructure: if the program has no such structure.
        ValueError: if a pattern of shared, or the prior of a shared site, is invalid.
    """
    if data.is_outline:
        with pyro.validation_enabled(False):  # whole and other numbers are simulated
            shown = simulated(program, data)
            try:
                every = torch.arange(shown.clients)
                return _found(program, data, shown, every, shared, improper_sd)
            except (RuntimeError, IndexError) as error:  # such as of a matrix of covariates
                raise unsuitable(error) from error
    ids = torch.arange(min(NUM_CHECKED_CLIENTS, data.clients))
    for _ in range(MAX_SEARCHES):
        structure, text = _found(program, data, data, ids, shared, improper_sd)
        contradicting = _contradicting(structure, data)
        if not len(contradicting):
            break
        ids = torch.cat([ids, contradicting]).unique()
    return structure, text


def _contradicting(structure: Structure, data: Federation) -> Tensor:
    """Return the id of the first client with rows that contradict a structure, if any."""
    for ids in torch.arange(data.clients).split(CHECKED_AT_ONCE):
        try:
            refuse_contradicting_rows(structure, on_cpu(data.batch(ids)))
        except OtherStructure as error:
            return torch.tensor(error.clients)
    return torch.zeros(0, dtype=torch.long)


def _found(
    program: Program,
    data: Federation,
    shown: Federation,
    ids: Tensor,
    shared: str,
    improper_sd: float,
) -> tuple[Structure, str]:
    """Return the structure that the rows of some clients show, which may be simulated."""
    one, rows = on_cpu(shown.batch(torch.tensor([0]))), int(data.sizes.max())
    if moving := with_own_support(program, shown):
        raise OtherStructure(f"the support of site {moving[0]!r} depends on other sites or on data")
    declared = Declared(program, shown, *layouts(program, one, shared, improper_sd, rows=rows))
    declared.check()
    if shown is data:  # simulated rows may be outside of supports
        declared.check_responses()
    sites = dict(latent(trace_prior(program, one, 3, 1.0)))
    _refuse_scales(sites, declared.client_sites, one)
    centered = _centered(sites, {site.name for site in declared.client_sites.sites})
    scaled_sites = {
        s.name for s in declared.shared_sites.sites if spread_by_others(sites[s.name]["fn"])
    }
    bare = Structure(
        program, centered, declared.shared_sites, declared.client_sites, torch.zeros(0, 0)
    )
    shared_sites, client_sites = layouts(bare, one, shared, improper_sd, rows=rows)
    if client_sites.of_rows and rows > MAX_ROWS_WITH_EFFECTS:
        name = name_of(client_sites.of_rows[0])
        raise OtherStructure(
            f"site {name!r} has a value for every row, and a client has {rows} rows; likelihood "
            f"factors take at most {MAX_ROWS_WITH_EFFECTS}"
        )
    powers = torch.zeros(client_sites.size, shared_sites.size, dtype=torch.float64)
    structure = replace(
        bare,
        shared_sites=shared_sites,
        client_sites=client_sites,
        powers=powers,
        scaled_sites=frozenset(scaled_sites),
    )
    some = on_cpu(shown.batch(ids))
    if client_sites.size:
        _check_roots(structure, shown)
        structure = _reads(_scaled(_correlated(structure, some), some), some)
        replace(declared, data=data).warn()
    else:
        structure = replace(structure, reads=torch.arange(shared_sites.size))
    _check_curvature(structure, some)
    structure = with_linear_mask(structure, some)
    if structure.linear is not None and not has_constant_noise(structure):
        _warn_of_constant(shown)
    return structure, declared.text()


def _warn_of_constant(data: Federation) -> None:
    """Warn if all responses are equal: their standard deviation may have no posterior then.

    It has one if clients have one row each, or if its prior vanishes fast enough at 0.
    """
    y = data.y[torch.cat(list(data.train))]
    if len(y) > 1 and bool((y == y[0]).all()):
        warn_user(
            f"all responses are {float(y[0]):g}, so that their standard deviation may have no "
            "proper posterior; check the data, or fix the standard deviation in the program",
        )


def refuse_contradicting_rows(structure: Structure, batch: Batch) -> None:
    """Raise OtherStructure if rows of clients contradict the structure of their program.

    It was found from the rows of the first clients, or from simulated ones, so each client checks
    that its own likelihood has the derivatives that the structure states. The error has the ids of
    these clients.
    """
    try:
        _refuse(structure, batch)
    except OtherStructure as error:
        for c, i in enumerate(batch.ids.tolist()):
            try:
                _refuse(structure, batch.select_clients(slice(c, c + 1)))
            except OtherStructure as own:
                raise OtherStructure(own.reason, [i], [c]) from None
        ids = batch.ids.tolist()
        raise OtherStructure(error.reason, ids, range(len(ids))) from None


def _refuse(structure: Structure, batch: Batch) -> None:
    """Raise OtherStructure if rows of clients contradict the structure of their program."""
    if structure.linear is not None and not is_linear(structure, batch):
        raise OtherStructure(
            "the response of a client is not linear in the effects, or its variance depends on "
            "other variables, unlike in the rows from which the method was built"
        )
    if not structure.client_sites.size:
        return
    u, eta = random_points(structure, batch, count=NUM_CHECKED_POINTS)
    u = u[:, :1].expand_as(u)  # [S, C, d], equal for all clients
    with torch.no_grad():
        roots = structure.evaluate(u, eta, batch).roots
        server = structure.evaluate(u[:, :1], eta[:, :1], blank(batch)).roots
    names = ", ".join(name_of(site.name) for site in structure.client_sites.sites)
    if not torch.allclose(roots, server.expand_as(roots)):
        raise OtherStructure(f"the scale of {names} depends on a client's data")
    unread = torch.ones(structure.shared_sites.size, dtype=torch.bool)
    unread[structure.reads] = False
    _, of_u, _ = _slopes(structure, batch, 2, count=NUM_CHECKED_POINTS)
    wrong = unread & bool(len(of_u)) & ~(of_u.abs() < DERIVATIVE_TOLERANCE).all(0)  # [d]
    if bool(wrong.any()):
        sizes = [len(site.mean) for site in structure.shared_sites.sites]
        parts = zip(structure.shared_sites.sites, wrong.split(sizes), strict=True)
        scales = ", ".join(site.name for site, part in parts if bool(part.any()))
        raise OtherStructure(
            f"the likelihood of a client depends on {scales} in another way than by the scale of "
            f"{names}, unlike in the rows from which the method was built"
        )


def _refuse_scales(sites: Mapping[str, Any], client_sites: Layout, batch: Batch) -> None:
    """Raise OtherStructure if an own site has a scale or mask that is not that of `batch.rows`."""

    def plain() -> None:
        with batch.clients():
            pyro.sample("once", dist.Normal(0.0, 1.0))
            with batch.rows():
                pyro.sample("in rows", dist.Normal(0.0, 1.0))

    with pyro.validation_enabled(False):  # rows may have weight 0
        expected = poutine.trace(plain).get_trace().nodes
    for name in (site.name for site in client_sites.sites):
        one: Mapping[str, Any] = expected["in rows" if name in client_sites.of_rows else "once"]
        for key, none in (("scale", 1.0), ("mask", True)):
            value, expected_value = (none if s[key] is None else s[key] for s in (sites[name], one))
            if bool((torch.as_tensor(value) != torch.as_tensor(expected_value)).any()):
                raise OtherStructure(f"site {name!r} of each client has a {key} of its own")


def _centered(sites: Mapping[str, Any], own: set[str]) -> frozenset[str]:
    """Return the own sites that are normal but not standard; OtherStructure for any other."""
    names = set()
    for name in own:
        base = base_of(sites[name]["fn"])
        if isinstance(base, torch.distributions.MultivariateNormal):
            names.add(name)
        elif not isinstance(base, torch.distributions.Normal):
            raise OtherStructure(
                f"site {name!r} of each client is a {type(base).__name__}; likelihood factors need "
                "normal own sites, given the shared ones"
            )
        elif bool((base.loc != 0).any()) or bool((base.scale != 1).any()):
            names.add(name)
    return frozenset(names)


def _check_roots(structure: Structure, data: Federation) -> None:
    """Raise OtherStructure if the scale of an own site depends on data or other own sites."""
    both = on_cpu(data.batch(torch.tensor([0, data.clients - 1])))
    u, eta = random_points(structure, both)
    u = u[:, :1].expand_as(u)  # [S, C, d], equal for all clients
    with torch.no_grad():
        roots = structure.evaluate(u, eta, both).roots
        other = structure.evaluate(u, eta.flip(0), both).roots
        flipped = replace(both, x=both.x.flip(1), y=both.y.flip(1))
        of_last_row = structure.evaluate(u, eta, flipped).roots
        server = structure.evaluate(u[:, :1], eta[:, :1], blank(both)).roots
    names = ", ".join(name_of(site.name) for site in structure.client_sites.sites)
    if not torch.allclose(roots, other, equal_nan=True):
        raise OtherStructure(f"the scale of {names} depends on another own site")
    alike = torch.allclose(roots, of_last_row, equal_nan=True)
    if not alike or not torch.allclose(roots, server.expand_as(roots)):
        raise OtherStructure(f"the scale of {names} depends on a client's data")


def _check_curvature(structure: Structure, batch: Batch) -> None:
    """Raise OtherStructure if the log likelihood has no second derivatives, as of Laplace's law.

    With large covariates it has some only near the middle of the prior. It may have steps alone, as
    with `sign` and `round`.
    """
    if _has_steps(structure, batch):
        raise OtherStructure("the log likelihood is piecewise constant")
    if _is_curved(structure, batch, 1.0):
        return
    if any(_is_curved(structure, batch, share) for share in PRIOR_FRACTIONS):
        raise OtherStructure(
            "the log likelihood is curved only in a small part of the prior, as with covariates "
            "that are not scaled"
        )
    raise OtherStructure(
        "the log likelihood is piecewise linear, so that it has no second derivatives"
    )


def _is_curved(structure: Structure, batch: Batch, share: float) -> bool:
    """Return whether the log likelihood has second derivatives at points of the prior.

    Their distance from its middle is multiplied by `share`.
    """
    middle = structure.shared_sites.prior()[0].double()
    u, eta = random_points(structure, batch)
    u, eta = (middle + share * (u - middle)).requires_grad_(), (share * eta).requires_grad_()
    with torch.enable_grad():
        none = 0 * (u.sum() + eta.sum())  # what the likelihood does not depend on has slope 0
        value = structure.evaluate(u, eta, batch).likelihood.sum() + none
        of_u, of_eta = torch.autograd.grad(value, (u, eta), create_graph=True)
        slope, at = (of_eta, eta) if bool(of_eta.any()) else (of_u, u)
        size = float(slope.detach().abs().max())
        (bend,) = torch.autograd.grad(slope.square().sum() + 0 * at.sum(), at)
    return not size or not float(bend.abs().max()) <= DERIVATIVE_TOLERANCE * size**2


def _has_steps(structure: Structure, batch: Batch) -> bool:
    """Return whether the log likelihood differs between points, and has slope 0 at all of them."""
    u, eta = (v.requires_grad_() for v in random_points(structure, batch))
    with torch.enable_grad():
        value = structure.evaluate(u, eta, batch).likelihood
        slopes = torch.autograd.grad(value.sum() + 0 * (u.sum() + eta.sum()), (u, eta))
    flat = not any(bool(slope.any()) for slope in slopes)
    return flat and bool((value != value[:1]).any())


def _slopes(
    structure: Structure, batch: Batch, *key: int, count: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return effects e and the slopes of the log likelihood by u and e, [S * C, ...], scaled.

    Points without a finite likelihood are left out.
    """
    u, eta = random_points(structure, batch, *key, count=count)
    with torch.no_grad():
        roots = structure.evaluate(u, eta, batch).roots
        e = (roots @ eta[..., None])[..., 0]  # [S, C, m]
    u, e = u.requires_grad_(), e.requires_grad_()
    with torch.enable_grad():
        eta = torch.linalg.solve(structure.evaluate(u, eta, batch).roots, e[..., None])[..., 0]
        total = structure.evaluate(u, eta, batch).likelihood.sum() + 0 * (u.sum() + e.sum())
        of_u, of_e = torch.autograd.grad(total, (u, e))
    size = torch.cat([of_u, of_e * e], -1).abs().amax(-1, keepdim=True)  # [S, C, 1]
    size = torch.where(size.isfinite() & (size > 0), size, torch.inf)
    good = (size < torch.inf)[..., 0]
    if not (count or bool(good.any())):
        raise OtherStructure("the likelihood of the first clients has no derivatives")
    return e.detach()[good], (of_u / size)[good], (of_e / size)[good]


def _correlated(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the roots of correlation matrices that own noise is rotated by."""
    begin = 0
    for root in structure.shared_sites.sites:
        at, begin = slice(begin, begin + len(root.mean)), begin + len(root.mean)
        k = tuple(root.transform(root.mean.view(root.shape)).shape)
        for site in structure.client_sites.sites:
            raw = not site.name.endswith(NONCENTERED) and not site.plate
            if raw and k == (len(site.mean),) * 2 and site.name not in structure.correlated:
                pairs = {**structure.correlated, site.name: root.name}
                new = replace(structure, correlated=pairs)
                if float(_slopes(new, batch)[1][:, at].detach().abs().max()) < DERIVATIVE_TOLERANCE:
                    structure = new
    return structure


def _scaled(structure: Structure, batch: Batch) -> Structure:
    """Return the structure with the powers by which shared variables scale the own noise."""
    if not structure.client_sites.size:
        return structure
    e, of_u, of_e = (v.detach() for v in _slopes(structure, batch))
    raw = torch.cat(
        [
            torch.full((len(s.mean),), not s.name.endswith(NONCENTERED))
            for s in structure.client_sites.sites
        ]
    )
    growth, powers = e * of_e * raw, structure.powers.clone()
    for i in structure.shared_sites.each("positive").nonzero()[:, 0].tolist():
        power = torch.linalg.lstsq(growth, of_u[:, i : i + 1], driver="gelsd").solution[:, 0]
        left = (growth @ power - of_u[:, i]).abs().max()
        if (
            float(left) < DERIVATIVE_TOLERANCE
            and float((power - power.round()).abs().max()) < DERIVATIVE_TOLERANCE**0.5
        ):
            powers[:, i] = power.round() + 0.0  # no negative zero
    begin = 0
    for site in structure.client_sites.sites:
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
    scales = of_roots.abs().sum((0, 1)) > 0  # [d]
    left = of_u.abs().amax(0) < DERIVATIVE_TOLERANCE
    mixed = bool((scales & ~left).any())
    return replace(structure, reads=(~(scales & left)).nonzero()[:, 0], mixed=mixed)
