"""What the programs of one client say about each of its rows, in every draw.

Clients are looked at one at a time: so no row is padding, and families that couple clients may be
drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
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
from pyrofl.inference.elbo import latent, log_densities, observed, per_draw, traces
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.draws import JointNoise, Values, named, of_rows
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Stream, stream
from pyrofl.tensors import Tensors, cut, matches, seeded

CELLS = 20_000  # rows times draws that a model is run on at once
DENSITIES = ("log_p", "log_q", "shared log_p", "shared log_q")

Client = tuple[Tensors, Tensors, Batch]
"""What programs read of one client: received, local, and a batch of all its rows."""

Pointwise = dict[str, dict[str, Values]]
"""What one client's programs say, values [S, 1, B or 1, *p]: the groups "posterior" (latent and
deterministic sites), "observed_data" (S = 1), "log_likelihood", "posterior_predictive" (draws of
the observed sites) and "density" (log densities of each draw: log_p of what the client's sites and
rows have under the model, log_q of its sites under the guide; "shared log_p" and "shared log_q" of
shared sites)."""


def pointwise(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    asked: Asked,
    *,
    of_prior: bool = False,
) -> list[Pointwise]:
    """Return what programs say of clients, in the order of ids; `of_prior` draws from the prior."""
    guide, found = prior(method.model) if of_prior else method.guide, {}
    draws, purpose = asked.draws or 1, Stream.PRIOR if of_prior else Stream.TEST
    source = partial(stream, asked.seed, purpose, state.number)
    for some, received, local, _ in single(method, data, state, ids, replace(asked, chunk=1)):
        client, name = (received, local, data.batch(some)), data.names[int(some)]
        noise = JointNoise([source(name)], method.shared, source)
        with pyro.validation_enabled(False), torch.no_grad(), noise:
            q, _ = traces(guide, guide, *client, draws)
        rows = stream(asked.seed, Stream.ROWS, purpose, state.number, name)
        known = partial(_replayed, guide, q)
        found[int(some)] = _said(method.model, method.shared, known, client, draws, rows)
    return [found[i] for i in ids.tolist()]


def pointwise_at(
    model: Program, shared: str, values: Tensors, client: Client, source: Generator
) -> Pointwise:
    """Return what a model says of one client, C = 1, in draws [S, *p] that are given."""

    def given(part: slice) -> Program:
        def program(received: Tensors, local: Tensors, batch: Batch) -> None:
            with batch.clients():
                for n, v in cut(values, part).items():
                    value = v.reshape(len(v), 1, 1, *v.shape[1:])
                    pyro.sample(n, dist.Delta(value, event_dim=v.dim() - 1))

        return program

    return _said(model, shared, given, client, len(next(iter(values.values()))), source)


def prior(model: Program) -> Program:
    """Return the prior of a model as a guide: its latent sites alone."""
    program: Program = poutine.block(model, hide_fn=lambda msg: bool(msg.get("is_observed")))
    return program


def _replayed(guide: Program, trace: Any, part: slice) -> Program:
    """Return the guide that repeats some of its draws."""
    some = trace.copy()
    for name, site in latent(trace):
        some.nodes[name] = site | {"value": site["value"][part]}
    program: Program = poutine.replay(guide, trace=some)
    return program


def _said(
    model: Program,
    shared: str,
    known: Callable[[slice], Program],
    client: Client,
    draws: int,
    source: Generator,
) -> Pointwise:
    """Join what is said in some draws each, those of `known`; `source` draws responses anew."""
    step = max(1, CELLS // client[2].mask.shape[1])
    with pyro.validation_enabled(False), torch.no_grad():
        parts = [
            _in_draws(model, shared, known(slice(at, at + step)), client, k, source)
            for at in range(0, draws, step)
            for k in [min(step, draws - at)]
        ]
    found: Pointwise = {}
    for group, sites in parts[0].items():
        some = parts[:1] if group == "observed_data" else parts
        found[group] = {
            name: Values(torch.cat([part[group][name].value for part in some]), first.rows)
            for name, first in sites.items()
        }
    return found


def _in_draws(
    model: Program, shared: str, guide: Program, client: Client, draws: int, source: Generator
) -> Pointwise:
    """Look at the draws of one client that the guide gives."""
    q, p = traces(model, guide, *client, draws)
    density = {n: client[2].size.new_zeros(draws, 1) for n in DENSITIES}
    for name, site in latent(q):
        whose = "shared " if matches(name, shared) else ""
        density[f"{whose}log_q"] += per_draw(log_densities(site, None, False)[0], 1)
        if name in p.nodes:
            density[f"{whose}log_p"] += per_draw(_log_prob(p.nodes[name]), 1)
    seen: Pointwise = {"observed_data": {}, "log_likelihood": {}, "posterior_predictive": {}}
    for name, site in observed(p):
        log_prob = _log_prob(site)
        density["log_p"] += per_draw(log_prob, 1)
        if isinstance(site["fn"], dist.Unit):  # pyro.factor: a cost, and no data
            continue
        with seeded(int(torch.randint(2**62, (), generator=source))):
            drawn = site["fn"].sample()
        event = site["fn"].event_dim
        for group, value, k, own in (
            ("observed_data", site["value"][None], 1, event),
            ("log_likelihood", log_prob, draws, 0),
            ("posterior_predictive", drawn, draws, event),
        ):
            # A site that no draw changes has no axis for them.
            value = value.expand(k, *value.shape[value.dim() - own - 2 :])
            seen[group][name] = Values(value, of_rows(site))
    weights = {n: Values(v[..., None], False) for n, v in density.items()}
    return {"posterior": named(q, p, draws, 1), "density": weights, **seen}


def _log_prob(site: Any) -> Tensor:
    """Return the log density of a site of the model, without the scale of minibatches."""
    value: Tensor = scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"])
    return value
