"""Values and log densities of sites for each client and row, at posterior or prior draws.

Clients are processed one at a time, so that no row is padding, and distributions that couple
clients can be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import (
    base_of,
    latent,
    log_densities,
    observed,
    per_draw,
    traces,
    weighed,
)
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.posteriors.draws import JointNoise, Values, is_per_row, named_draws
from pyrofl.inference.posteriors.server import SiteSubstitution, server_sampler
from pyrofl.plates import plate
from pyrofl.tensors import Tensors, matches, seeded
from pyrofl.turns import synchronized

MAX_CELLS = 20_000  # maximum rows times draws in one run of a model
DENSITIES = ("log_p", "log_q", "shared log_p", "shared log_q")

Client = tuple[Tensors, Tensors, Batch]
"""Inputs of the programs for one client: received, local, and a batch of all its rows."""

ClientValues = dict[str, dict[str, Values]]
"""Results of one client's programs, [S, 1, B or 1, *p], in groups: "posterior" (latent and
deterministic sites), "observed_data" (S = 1), "log_likelihood" (also of a `pyro.factor` of rows;
multiplied by the row's weight, and NaN where a mask in the model hides a response),
"posterior_predictive" (draws of the observed sites), "log_prior" (of each latent site) and
"density" (log densities of each draw: log_p of the client's sites and rows under the model, log_q
of its sites under the guide; "shared log_p" and "shared log_q" of shared sites)."""


@synchronized
def pointwise(
    method: Method,
    data: Federation,
    state: RoundState,
    ids: Tensor,
    spec: EvaluationSpec,
    *,
    of_prior: bool = False,
) -> list[ClientValues]:
    """Return clients' site values and log densities at draws from the guide or the prior."""
    guide, values_by_client = method.guide, {}
    if of_prior:  # the model's latent sites serve as a guide
        guide = poutine.block(method.model, hide_fn=lambda msg: bool(msg.get("is_observed")))
    draws, purpose = spec.draws or 1, Stream.PRIOR if of_prior else Stream.TEST
    source = partial(stream, spec.seed, purpose, state.number)
    server, spec = server_sampler(method, state, spec, of_prior)
    for some, received, local, _ in single(method, data, state, ids, replace(spec, chunk_size=1)):
        client, name = (received, local, data.batch(some)), data.names[int(some)]
        noise, server_draws = (
            JointNoise([source(name)], method.shared, source),
            server(client[2].cohort),
        )
        with pyro.validation_enabled(False), torch.no_grad(), noise, SiteSubstitution(server_draws):
            q, _ = traces(guide, guide, *client, draws)
        rows = stream(spec.seed, Stream.ROWS, purpose, state.number, name)
        replay = partial(_replayed, guide, q)
        said = _in_chunks(method.model, method.shared, replay, client, draws, rows)
        if server_draws:  # their density is unknown
            del said["density"]
            # [S, 1, 1, *p]
            also = {n: Values(v[:, :, None], False) for n, v in server_draws.items()}
            said["posterior"] = also | said["posterior"]
        values_by_client[int(some)] = said
    return [values_by_client[i] for i in ids.tolist()]


def pointwise_at(
    model: Program, shared: str, values: Mapping[str, Values], client: Client, source: Generator
) -> ClientValues:
    """Return one client's site values and log densities at given posterior draws.

    These are [S, 1, B or 1, *p].

    The draws are of the posterior: log_q equals log_p.
    """

    def point_guide(part: slice) -> Program:
        def program(received: Tensors, local: Tensors, batch: Batch) -> None:
            with batch.clients():
                for n, v in values.items():
                    value = v.value[part]
                    places, name = value.shape[2], "rows" if v.rows else "places"
                    with plate(name, places, -1) if v.rows or places > 1 else nullcontext():
                        pyro.sample(n, dist.Delta(value, event_dim=value.dim() - 3))

        return program

    said = _in_chunks(
        model, shared, point_guide, client, len(next(iter(values.values())).value), source
    )
    density = said["density"]
    exact = {n: density[n.replace("log_q", "log_p")] for n in density}
    return said | {"density": exact}


def _replayed(guide: Program, trace: Any, part: slice) -> Program:
    """Return the guide with its latent sites fixed to some draws of an earlier trace."""
    some = trace.copy()
    for name, site in latent(trace):
        some.nodes[name] = site | {"value": site["value"][part]}
    program: Program = poutine.replay(guide, trace=some)
    return program


def _in_chunks(
    model: Program,
    shared: str,
    guide_of: Callable[[slice], Program],
    client: Client,
    draws: int,
    source: Generator,
) -> ClientValues:
    """Return one client's site values and log densities, computed in chunks of draws."""
    step = max(1, MAX_CELLS // client[2].mask.shape[1])
    with pyro.validation_enabled(False), torch.no_grad():
        parts = [
            _results_of_chunk(model, shared, guide_of(slice(at, at + step)), client, k, source)
            for at in range(0, draws, step)
            for k in [min(step, draws - at)]
        ]
    values: ClientValues = {}
    for group, sites in parts[0].items():
        some = parts[:1] if group == "observed_data" else parts
        values[group] = {
            name: Values(torch.cat([part[group][name].value for part in some]), first.rows)
            for name, first in sites.items()
        }
    return values


def _results_of_chunk(
    model: Program, shared: str, guide: Program, client: Client, draws: int, source: Generator
) -> ClientValues:
    """Return one client's site values and log densities for one chunk of draws."""
    q, p = traces(model, guide, *client, draws)
    density = densities(shared, q, p, client[2].size.new_zeros(draws, 1))
    prior = {
        # [S, 1, 1], without the axes of the site.
        name: Values(per_draw(_log_prob(p.nodes[name]), 1).expand(draws, 1)[..., None], False)
        for name, _ in latent(q)
        if name in p.nodes and not isinstance(base_of(p.nodes[name]["fn"]), dist.ImproperUniform)
    }
    seen: ClientValues = {"observed_data": {}, "log_likelihood": {}, "posterior_predictive": {}}
    for name, site in observed(p):
        said = {"log_likelihood": (_nan_if_masked(site), draws, 0)}
        if isinstance(site["fn"], dist.Unit):  # pyro.factor: a cost, and no data
            said = said if is_per_row(site) else {}
        else:
            with seeded(int(torch.randint(2**62, (), generator=source))):
                drawn = site["fn"].sample()
            event = site["fn"].event_dim
            said["observed_data"] = (_integers_if_discrete(site, site["value"][None]), 1, event)
            said["posterior_predictive"] = (_integers_if_discrete(site, drawn), draws, event)
        for group, (value, k, event_dims) in said.items():
            # A site that is equal in all draws has no axis for them.
            value = value.expand(k, *value.shape[value.dim() - event_dims - 2 :])
            seen[group][name] = Values(value, is_per_row(site))
    weights = {n: Values(v[..., None], False) for n, v in density.items()}  # [S, 1, 1]
    latent_values = {
        "posterior": named_draws(q, p, draws, 1),
        "log_prior": prior,
        "density": weights,
    }
    return latent_values | seen


def densities(shared: str, q: Any, p: Any, zero: Tensor) -> Tensors:
    """Return clients' log densities of each draw under model (log_p) and guide (log_q).

    They are [S, C] as `zero`, of own and of shared sites.
    """
    totals, clients = dict.fromkeys(DENSITIES, zero), zero.shape[1]
    for name, site in latent(q):
        whose = "shared " if matches(name, shared) else ""
        log_q = per_draw(log_densities(site, None, False)[0], clients)
        totals[f"{whose}log_q"] = totals[f"{whose}log_q"] + log_q
        if name in p.nodes:
            log_p = per_draw(_weighed(p.nodes[name]), clients)
            totals[f"{whose}log_p"] = totals[f"{whose}log_p"] + log_p
    for _, site in observed(p):
        totals["log_p"] = totals["log_p"] + per_draw(_weighed(site), clients)
    return totals


def _nan_if_masked(site: Any) -> Tensor:
    """Return the weighted log density of every row, with NaN for rows masked in the model."""
    value, mask = _weighed(site), site["mask"]
    if isinstance(site["fn"], dist.MaskedDistribution):
        mask = site["fn"]._mask if mask is None else mask & site["fn"]._mask
    return value if mask is None else torch.where(torch.as_tensor(mask), value, torch.nan)


def _integers_if_discrete(site: Any, value: Tensor) -> Tensor:
    """Convert a site's value to integers if its distribution is discrete."""
    return value.long() if site["fn"].support.is_discrete else value


def _weighed(site: Any) -> Tensor:
    """Return the log density of a site, multiplied by row weights and `poutine.scale`."""
    return weighed(site, site["fn"].log_prob(site["value"]))


def _log_prob(site: Any) -> Tensor:
    """Return the masked log density of a model site, without `poutine.scale` and row weights."""
    value: Tensor = scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"])
    return value
