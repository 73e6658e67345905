"""Validation of the sites that a user declares as shared.

A site that is missing in `shared` belongs to each client, which is another model that fits as well.
What is declared is therefore shown before a fit, and what contradicts the program is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import (
    base_of,
    latent,
    log_prob,
    observed,
    parameters,
    per_draw,
    weighed,
)
from pyrofl.inference.definition.programs import NONCENTERED, Program
from pyrofl.models.shared.sites import LatentSite, Layout
from pyrofl.models.shared.unconstrained import name_of, spread_by_others, trace_prior
from pyrofl.user_warnings import warn_user

PRIOR_DRAWS = 3  # of the prior, to see what changes with what
# Draws of one run, of which many reach a branch; their cells.
NUM_JOINT_DRAWS, MAX_CELLS = 400, 2_000_000
NUM_SINGLE_DRAWS = 8  # draws that are compared with a run of each alone
MAY_BE_INFINITE = "logits", "probs"  # parameters
MAX_CLIENTS = 64  # whose responses are checked at a time


@dataclass(frozen=True)
class Declared:
    """User's Pyro program, and the names of its latent sites that all clients share."""

    program: Program
    data: Federation
    shared_sites: Layout
    client_sites: Layout

    def text(self) -> str:
        """Return a text that lists the shared latent sites and the clients' own ones."""
        shared = f"shared by all clients: {_listed(self.shared_sites.sites)}"
        return f"{shared}; own to each client: {_listed(self.client_sites.sites) or 'none'}"

    def check(self) -> None:
        """Validate the sites declared as shared.

        Raises:
            ValueError: if the prior of a shared site depends on what a client has for itself, or on
                its data, or has an invalid parameter; or a site's name ends as those that the
                library adds.
        """
        self._refuse_priors(self.shared)
        for name in self.values:
            if name.endswith(NONCENTERED):
                raise ValueError(
                    f"the name of site {name!r} ends in {NONCENTERED!r}, which is reserved; "
                    "rename it"
                )
        for name in self.shared:
            if name in self.changed(self.shared)[0]:
                others = ", ".join(m for m in self.own if name in self.changed(self.but(m))[0])
                raise ValueError(
                    f"{name!r} is in shared, and its prior depends on {others}, which each client "
                    f"has for itself; add {others} to shared, or remove {name!r} from it"
                )
        for name in self.of_data():
            raise ValueError(
                f"{name!r} is in shared, and its prior depends on the client's data; use the same "
                f"prior for all clients, or remove {name!r} from shared"
            )
        self.refuse_joint_draws()

    def check_responses(self) -> None:
        """Raise ValueError if a response of any client has no density; see `refuse_values`.

        Nor may an own site's prior have invalid parameters. Without rows, nothing is known of them.
        """
        if not self.data.is_outline:
            self._refuse_priors(self.own)
        for start in range(0, 0 if self.data.is_outline else self.data.clients, MAX_CLIENTS):
            ids = torch.arange(start, min(start + MAX_CLIENTS, self.data.clients))
            self.refuse_values(self.data.batch(ids))

    def _refuse_priors(self, names: Iterable[str]) -> None:
        """Raise ValueError if a parameter of the prior of a named site is invalid at all draws."""
        both = self.data.batch(torch.tensor([0, self.data.clients - 1]))
        for name, site in latent(trace_prior(self.program, both, NUM_SINGLE_DRAWS, 1.0)):
            if name in names:
                _refuse_parameters(name, site["fn"])

    def refuse_joint_draws(self) -> None:
        """Raise ValueError if densities at several draws in one run are not those of each alone."""
        both = self.data.batch(torch.tensor([0, self.data.clients - 1]))
        draws = max(NUM_SINGLE_DRAWS, min(NUM_JOINT_DRAWS, MAX_CELLS // both.mask.numel()))
        every = trace_prior(self.program, both, draws, 1.0)
        values = {name: site["value"] for name, site in latent(every)}
        at_all = _densities(every, both)
        for s in range(NUM_SINGLE_DRAWS):
            alone = {
                name: value[s : s + 1] if len(value) == draws else value
                for name, value in values.items()
            }
            run = trace_prior(poutine.condition(self.program, alone), both, 1, 1.0)
            densities = _densities(run, both)
            if densities.keys() != at_all.keys():
                return  # a site of one branch alone, which the validation of the method explains
            for name, density in densities.items():
                together = at_all[name]
                one = together[s] if len(together) > 1 else together[0]
                if not torch.allclose(one, density[0], rtol=1e-3, atol=1e-3, equal_nan=True):
                    again = _densities(
                        trace_prior(poutine.condition(self.program, values), both, draws, 1.0), both
                    )
                    if not torch.allclose(again[name], together, equal_nan=True):
                        raise ValueError(
                            f"the density of site {name!r} changes from run to run at the same "
                            "values of all sites: draw random numbers by pyro.sample alone"
                        )
                    raise ValueError(
                        f"the density of site {name!r} at one draw depends on other draws of the "
                        "same run: use batched operations, such as torch.where instead of if, and "
                        "no means over the first axis, which is that of the draws"
                    )

    def refuse_values(self, batch: Batch) -> None:
        """Raise ValueError if a response has no density, whatever the values of the latent sites.

        Such a value is outside of the support of its distribution, or at the boundary.
        """
        for name, site in self.run((), batch).nodes.items():
            if site["type"] != "sample" or not site["is_observed"] or name in self.values:
                continue
            fn, value = site["fn"], site["value"]
            _refuse_parameters(name, fn)
            if not _is_valid(fn, value):
                continue  # the validation of the method explains it
            bounds = vars(base_of(fn).support).values() if value.is_floating_point() else ()
            if fn.event_dim or not bounds or any(isinstance(v, Tensor) for v in bounds):
                continue
            with pyro.validation_enabled(False):
                density = fn.log_prob(value)
                shape = (PRIOR_DRAWS, *batch.mask.shape)
                if density.shape != shape or value.shape[-2:] != batch.mask.shape:
                    continue
                values = value.expand(shape)
                outside = ~base_of(fn).support.check(values[0])
                without = ~density.isfinite().any(0)
                good = density.isfinite().all(0) & batch.mask & ~outside
                if bool(good.any()):  # where another value has a density, it is the value's fault
                    without &= fn.log_prob(values[0][good][0].expand(shape)).isfinite().all(0)
                    outside |= without
            for c, b in (outside & batch.mask).nonzero()[:1].tolist():
                raise ValueError(
                    f"{self.data.names[int(batch.ids[c])]}: site {name!r} has the value "
                    f"{float(values[0, c, b]):g}, which has no density under its "
                    f"{type(base_of(fn)).__name__}: it is outside of the support or at the "
                    "boundary; move such values inside, or use another distribution"
                )

    def warn(self) -> None:
        """Warn of sites that are probably missing in the declaration."""
        if forgotten := ", ".join(self.forgotten()):
            warn_user(
                f"each client has its own {forgotten}, and its rows cannot separate them from its "
                f"other unknowns; add to shared what is one for all clients"
            )

    def forgotten(self) -> list[str]:
        """Return the client-specific sites that a client's own rows cannot identify."""
        sizes = {
            name: len(s.mean) for s, name in zip(self.client_sites.sites, self.own, strict=True)
        }
        alone = {
            name for s, name in zip(self.client_sites.sites, self.own, strict=True) if not s.plate
        }
        by_own, by_shared = self.changed(self.shared), self.changed(self.own)
        names = []
        # The scale of no more unknowns than it has entries, if no shared site has a part in it.
        for name in alone if by_own[1] else ():
            scaled = set(self.own) & self.changed(self.but(name))[1]
            few = sum(sizes[n] for n in scaled) <= sizes[name]
            if scaled and scaled <= alone and few and not scaled & by_shared[1]:
                names.append(name)
        fixed = alone - by_own[0] - by_shared[0]
        # The mean of no more unknowns than it has entries, which no row depends on but by them.
        for name in fixed.difference(names) if by_own[0] else ():
            children = self.changed(self.but(name))[0]
            few = sum(sizes.get(n, 0) for n in children) <= sizes[name]
            means = children - self.changed(self.but(name))[1]
            if children and children <= alone and few and means and not self.observed(name):
                names.append(name)
        # More numbers with fixed priors than any client has rows.
        single = [n for n in self.own if n in fixed and sizes[n] == 1]
        if len(single) > max(1, int(self.data.sizes.max())):
            names += [n for n in single if n not in names]
        return sorted(names, key=self.own.index)

    @cached_property
    def shared(self) -> list[str]:
        """Names of the sites that all clients share, as in the user's program."""
        return [_name(site) for site in self.shared_sites.sites]

    @cached_property
    def own(self) -> list[str]:
        """Names of the sites that each client has separately, as in the user's program."""
        return [_name(site) for site in self.client_sites.sites]

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Prior draws of all latent sites of the user's program, by name."""
        latent_sites = latent(
            trace_prior(self.program, self.data.batch(torch.tensor([0])), PRIOR_DRAWS, 1.0)
        )
        return {name: site["value"] for name, site in latent_sites}

    def but(self, name: str) -> list[str]:
        """Return the names of all latent sites except the given one."""
        return [n for n in self.values if n != name]

    def changed(self, held: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the sites with a random prior, and those with a random scale, given fixed sites.

        `held` are the fixed sites.
        """
        changed, scales = set[str](), set[str]()
        for name, fn in self.priors(held, self.data.batch(torch.tensor([0]))):
            density = fn.log_prob(self.values[name][:1]).nan_to_num()
            if len(density) > 1 and bool((density != density[:1]).any()):
                changed.add(name)
            if spread_by_others(fn):
                scales.add(name)
        return changed, scales

    def observed(self, name: str) -> bool:
        """Return whether the observations depend on a latent site, given all other sites."""
        batch = self.data.batch(torch.tensor([0]))
        for other, site in self.run(self.but(name), batch).nodes.items():
            if site["type"] == "sample" and site["is_observed"] and other not in self.values:
                density = site["fn"].log_prob(site["value"]).nan_to_num()
                if density.dim() > 2 and bool((density != density[:1]).any()):
                    return True
        return False

    def of_data(self) -> list[str]:
        """Return the shared sites with different priors at the first and the last client."""
        both = self.data.batch(torch.tensor([0, self.data.clients - 1]))
        names = []
        for name, fn in self.priors(self.shared, both):
            if name not in self.shared:
                continue
            density = fn.log_prob(self.values[name][:1]).nan_to_num()
            axis = density.dim() - 2
            first, last = (density.select(axis, i) for i in (0, -1))
            if not torch.equal(first, last):
                names.append(name)
        return names

    def priors(self, held: Iterable[str], batch: Batch) -> Iterator[tuple[str, Any]]:
        """Yield each latent site's name and prior, with given sites fixed at their first draws."""
        run = self.run(held, batch)
        with pyro.validation_enabled(False):
            yield from ((name, run.nodes[name]["fn"]) for name in self.values if name in run.nodes)

    def run(self, held: Iterable[str], batch: Batch) -> Any:
        """Return a trace of the user's program, with given sites fixed at their first draws."""
        first = {}
        for name in held:  # at all clients, as programs may rely on the axis
            value = self.values[name]
            first[name] = value[:1].expand(PRIOR_DRAWS, len(batch), *value.shape[2:])  # [S, C, ...]
        return trace_prior(poutine.condition(self.program, first), batch, PRIOR_DRAWS, 1.0)


def _refuse_parameters(name: str, fn: Any) -> None:
    """Raise ValueError if an entry of a parameter is invalid at all draws, clients and rows."""
    for parameter, value, constraint in parameters(fn):
        finite = ~value.isnan() if parameter in MAY_BE_INFINITE else value.isfinite()
        for _ in range(constraint.event_dim):
            finite = finite.all(-1)
        good = constraint.check(value) & finite
        # [S, C, B, *p] -> [*p]; one valid value suffices, as others may be of padding.
        entries = good.flatten(0, min(good.dim(), 3) - 1).any(0) if good.dim() > 1 else good
        if not (constraint.is_discrete or bool(entries.all())):
            raise ValueError(
                f"{parameter} of the distribution of {name!r} is "
                f"{float(value[~good].flatten()[0]):g} at all draws of the prior; expected finite "
                f"values that satisfy {constraint}"
            )


def _is_valid(fn: Any, value: Any) -> bool:
    """Return whether a site has a tensor, and a distribution with parameters in their ranges."""
    if not isinstance(value, Tensor) or not hasattr(fn, "log_prob"):
        return False
    base = base_of(fn)
    ranges = getattr(base, "arg_constraints", {})
    parameters = {name: getattr(base, name, None) for name in ranges}
    return all(
        bool(ranges[name].check(v).all())
        for name, v in parameters.items()
        if isinstance(v, Tensor) and not constraints.is_dependent(ranges[name])
    )


def _densities(trace: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the log densities [S, C] of the sites of a trace, by name."""
    densities = {}
    with pyro.validation_enabled(False):
        for name, site in (*latent(trace), *observed(trace)):
            fn = site["fn"]
            if _is_valid(fn, site["value"]) and not isinstance(base_of(fn), dist.ImproperUniform):
                densities[name] = per_draw(weighed(site, log_prob(name, site)), len(batch))
    return densities


def _name(site: LatentSite) -> str:
    return name_of(site.name)


def _listed(sites: Iterable[LatentSite]) -> str:
    """Return a text with the names of latent sites, and their sizes where these are not 1."""
    texts = []
    for site in sites:
        size = "one per row" if site.of_rows else str(len(site.mean))
        texts.append(_name(site) + (f" ({size})" if size != "1" else ""))
    return ", ".join(texts)
