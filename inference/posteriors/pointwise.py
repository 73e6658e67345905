"""What the programs of one client say about each of its rows, in every draw.

Clients are looked at one at a time: so no row is padding, and families that couple clients may be
drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.draws import JointNoise, Values, named, of_rows, single
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Stream, stream
from pyrofl.tensors import Tensors, cut, matches, seeded

CELLS = 20_000  # rows times draws that a model is run on at once
DENSITIES = ("log_p", "log_q", "shared log_p", "shared log_q")

Pointwise = dict[str, dict[str, Values]]
"""What one client's programs say, values [S, 1, B or 1, *p]: the groups "sites" (latent and
deterministic), "observed" (S = 1), "log_likelihood", "predicted" (draws of the observed sites) and
"density" (log densities of each draw: log_p of what the client's sites and rows have under the
model, log_q of its sites under the guide; "shared log_p" and "shared log_q" of shared sites)."""


def pointwise(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    asked: Asked,
    *,
    of_prior: bool = False,
) -> list[Pointwise]:
    """Return what the programs of clients say, in the order of ids.

    `of_prior` draws from the model's prior given the server, instead of from the guide.

    Raises:
        ValueError: if the view is an ensemble.
        NotImplementedError: if a prior is improper.
    """
    guide, found = prior(method.model) if of_prior else method.guide, {}
    draws, purpose = asked.draws or 1, Stream.PRIOR if of_prior else Stream.TEST
    source = partial(stream, asked.seed, purpose, state.number)
    alone = replace(asked, chunk=1)
    for some, received, local, _ in single(method, data, state, ids, alone):
        batch, name = data.batch(some), data.names[int(some)]
        with pyro.validation_enabled(False), torch.no_grad():
            with JointNoise([source(name)], method.shared, source):
                q, _ = traces(guide, guide, received, local, batch, draws)
            rows = stream(asked.seed, Stream.ROWS, purpose, state.number, name)
            say = partial(_of_draws, method.model, method.shared)
            found[int(some)] = _joined(
                say(poutine.replay(guide, trace=part), received, local, batch, k, rows)
                for part, k in _sliced(q, draws, _step(batch))
            )
    return [found[i] for i in ids.tolist()]


def pointwise_at(
    model: Program,
    shared: str,
    values: Tensors,
    received: Tensors,
    local: Tensors,
    batch: Batch,
    source: Generator,
) -> Pointwise:
    """Return what a model says of one client, C = 1, in draws [S, *p] that are given.

    The batch has all the client's rows; `source` draws the observed sites anew.
    """

    def guide(some: Tensors) -> Program:
        def program(received: Tensors, local: Tensors, batch: Batch) -> None:
            with batch.clients():
                for n, v in some.items():
                    value = v.reshape(len(v), 1, 1, *v.shape[1:])
                    pyro.sample(n, dist.Delta(value, event_dim=v.dim() - 1))

        return program

    draws, step = len(next(iter(values.values()))), _step(batch)
    say = partial(_of_draws, model, shared)
    with pyro.validation_enabled(False), torch.no_grad():
        return _joined(
            say(guide(cut(values, slice(at, at + step))), received, local, batch, k, source)
            for at in range(0, draws, step)
            for k in [min(step, draws - at)]
        )


def prior(model: Program) -> Program:
    """Return the prior of a model as a guide: its latent sites alone."""
    program: Program = poutine.block(model, hide_fn=lambda msg: bool(msg.get("is_observed")))
    return program


def _step(batch: Batch) -> int:
    """Return how many draws a model is run on at once."""
    return max(1, CELLS // batch.mask.shape[1])


def _of_draws(
    model: Program,
    shared: str,
    guide: Program,
    received: Tensors,
    local: Tensors,
    batch: Batch,
    draws: int,
    source: Generator,
) -> Pointwise:
    """Look at draws of one client that the guide gives; `source` draws the observed sites anew."""
    q, p = traces(model, guide, received, local, batch, draws)
    density = {n: batch.size.new_zeros(draws, 1) for n in DENSITIES}
    for name, site in latent(q):
        whose = "shared " if matches(name, shared) else ""
        density[f"{whose}log_q"] += per_draw(log_densities(site, None, False)[0], 1)
        if name in p.nodes:
            density[f"{whose}log_p"] += per_draw(_log_prob(p.nodes[name]), 1)
    seen: Pointwise = {"observed": {}, "log_likelihood": {}, "predicted": {}}
    for name, site in observed(p):
        log_prob = _log_prob(site)
        density["log_p"] += per_draw(log_prob, 1)
        if isinstance(site["fn"], dist.Unit):  # pyro.factor: a cost, and no data
            continue
        with seeded(int(torch.randint(2**62, (), generator=source))):
            drawn = site["fn"].sample()
        rows = of_rows(site)
        values = {"observed": site["value"][None], "log_likelihood": log_prob, "predicted": drawn}
        for group, value in values.items():
            k = 1 if group == "observed" else draws
            # A site that no draw changes has no axis for them.
            event = 0 if group == "log_likelihood" else site["fn"].event_dim
            value = value.expand(k, *value.shape[value.dim() - event - 2 :])
            seen[group][name] = Values(value, rows)
    weights = {n: Values(v[..., None], False) for n, v in density.items()}
    return {"sites": named(q, p, draws, 1), "density": weights, **seen}


def _log_prob(site: Any) -> Tensor:
    """Return the log density of a site of the model, without the scale of minibatches."""
    value: Tensor = scale_and_mask(site["fn"].log_prob(site["value"]), mask=site["mask"])
    return value


def _sliced(trace: Any, draws: int, step: int) -> Iterator[tuple[Any, int]]:
    """Yield traces of some of the draws each, and how many."""
    for start in range(0, draws, step):
        part = trace.copy()
        for name, site in latent(trace):
            part.nodes[name] = site | {"value": site["value"][start : start + step]}
        yield part, min(step, draws - start)


def _joined(parts: Iterator[Pointwise]) -> Pointwise:
    """Join what is said of some of the draws each."""
    first, *rest = parts
    fixed = {"observed": first.pop("observed")}
    return fixed | {
        group: {
            name: Values(torch.cat([v.value, *(s[group][name].value for s in rest)]), v.rows)
            for name, v in values.items()
        }
        for group, values in first.items()
    }
