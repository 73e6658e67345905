"""Dependency graph of a method's model: sites, their plates, and the tensors they depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.inspect import TrackProvenance, site_is_deterministic
from pyro.ops.provenance import get_provenance, track_provenance
from pyro.poutine.util import site_is_subsample

from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import base_of, with_rows
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.tensors import Tensors, default_type, matches
from pyrofl.turns import synchronized


@dataclass(frozen=True)
class SiteDependencies:
    """Description of a model site: its distribution, plates and dependencies.

    Attributes:
        distribution: its name, such as "Normal".
        reads: names of sites and of tensors that it depends on.
        plates: names of its plates, "clients" and "rows"; shared sites are not in that of the
            clients, though each client has a copy.
        observed: whether its value is data.
    """

    distribution: str
    reads: tuple[str, ...]
    plates: tuple[str, ...]
    observed: bool


@synchronized
@checked
def get_dependencies(method: Method, data: Federation) -> dict[str, SiteDependencies]:
    """Return the sample sites of a method's model by name, with plates and dependencies.

    Args:
        method: the method.
        data: the federation; its first client is used, before training.

    Returns:
        Site -> its properties and dependencies: other sites, "server NAME" for received tensors,
        and "client NAME" for client state. `figures.plates` draws it.
    """
    cohort = data.cohort(torch.arange(1))
    received, private = client_inputs(method, data, first(method, data, 0), cohort, 0)
    batch = data.batch(cohort.ids)
    with torch.no_grad(), pyro.validation_enabled(False), default_type(data.dtype):
        sent = _traced("server", with_rows(received, 1))
        client_tensors = _traced("client", with_rows(private, 1))
        with TrackProvenance(include_deterministic=True):
            model = poutine.trace(method.model).get_trace(sent, client_tensors | sent, batch)
    return dict(_related(model, method.shared))


def _traced(place: str, tensors: Tensors) -> Tensors:
    return {n: track_provenance(v, frozenset({f"{place} {n}"})) for n, v in tensors.items()}


def _related(trace: Any, shared: str) -> Iterator[tuple[str, SiteDependencies]]:
    order = {name: i for i, name in enumerate(trace.nodes)}  # tensors come first, by name
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site_is_subsample(site):
            continue
        is_computed = site_is_deterministic(site)
        frames, one = (f.name for f in site["cond_indep_stack"]), matches(name, shared)
        density = site["fn"].base_dist if is_computed else site["fn"]
        reads = get_provenance(density.log_prob(site["value"])) - {name}
        yield (
            name,
            SiteDependencies(
                "Deterministic" if is_computed else type(base_of(site["fn"])).__name__,
                tuple(sorted(reads, key=lambda name: (order.get(name, -1), name))),
                tuple(n for n in frames if not (one and n == "clients")),
                site["is_observed"] and not is_computed,
            ),
        )
