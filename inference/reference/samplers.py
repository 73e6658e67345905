"""Reference inference: the same Pyro program with all clients pooled, and what federation costs.

A user's program is written once, for clients that each hold their own copy of what all share:

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            theta = pyro.sample("theta", dist.Normal(mu, 10.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)

Here it runs on one batch of all clients, and a site named in `shared` is sampled once for all of
them. Sites outside `batch.clients()` are sampled once in any case.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro.infer import MCMC, NUTS, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyrofl.arguments import Count, CountOrNone, Positive, checked
from pyrofl.data import Federation
from pyrofl.inference.elbo import latent
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import ClientAxes, Variable, chained, of_prior
from pyrofl.inference.programs import Program
from pyrofl.inference.reference.joint import Dims, Joint, alone, joined
from pyrofl.inference.seeds import Stream, stream
from pyrofl.tensors import Tensors


@checked
def nuts(
    model: Method | Program,
    data: Federation,
    draws: Count = 1000,
    warmup: CountOrNone = 1000,
    chains: Count = 4,
    seed: CountOrNone = 0,
    *,
    state: Round | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
    jit: bool = False,
    **options: Any,
) -> Any:
    """Draw from the joint posterior of all clients by Pyro's NUTS, one chain after the other.

    Args:
        model: a program (received, local, batch), or a method for its model.
        data: the federation; draws have its floating-point type, and float64 is worth its time.
        draws: of each chain.
        warmup: steps of each chain before them.
        chains: how many.
        seed: fixes all random numbers.
        state: a round of the method, for a model that reads what the server or the client holds.
        shared: patterns of the sites that all clients share; default the method's, or none.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
        jit: compile the density: about three times faster, for programs whose Python control
            flow depends on no latent value.
        options: of `pyro.infer.NUTS`, such as target_accept_prob.

    Returns:
        What `Run.to_arviz` gives with groups="all"; log_p and log_q in sample_stats are equal, as
        these are draws of the posterior, and `diverging` is there too.

    Raises:
        ValueError: if a number is out of its range, the model reads what it is not given, the
            prior of a shared site differs between clients, or a latent site lies inside
            `batch.rows()`.
    """
    bound = joined(model, data, state, seed, shared)
    found, diverging = [], torch.zeros(chains, draws, dtype=torch.bool)
    for chain in range(chains):
        with alone(data, seed, chain), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
            kernel = NUTS(bound[0], jit_compile=jit, ignore_jit_warnings=True, **options)
            sampler = MCMC(kernel, draws, warmup_steps=warmup, disable_progbar=True)
            sampler.run()
        found.append(sampler.get_samples())
        diverging[chain, sampler.diagnostics()["divergences"]["chain 0"]] = True
    return _gathered(bound, data, found, seed, dims or {}, {"diverging": diverging})


@checked
def centralised(
    model: Method | Program,
    data: Federation,
    draws: Count = 1000,
    seed: CountOrNone = 0,
    *,
    guide: Callable[..., Any] = AutoMultivariateNormal,
    steps: Count = 2000,
    lr: Positive = 0.02,
    particles: Count = 16,
    state: Round | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
) -> Any:
    """Fit the joint posterior of all clients by SVI with an automatic guide, and draw from it.

    Between NUTS and a federated fit it tells the price of the guide from that of federation.

    Args:
        model: as in `nuts`, as are data, seed, state, shared and dims.
        data: the federation.
        draws: from the guide.
        seed: fixes all random numbers.
        guide: makes an automatic guide of a model.
        steps: of Adam, whose learning rate falls to zero.
        lr: its learning rate at first.
        particles: Monte Carlo draws of the ELBO.
        state: a round of the method.
        shared: patterns of shared sites.
        dims: names of axes.

    Returns:
        As `nuts`, with one chain; log_q is the guide's, and sample_stats have the last loss.

    Raises:
        ValueError: as `nuts`.
    """
    bound = joined(model, data, state, seed, shared)
    with alone(data, seed), pyro.settings.context(module_local_params=True):
        q = guide(bound[0])
        elbo: Any = Trace_ELBO(particles, max_plate_nesting=2, vectorize_particles=True)
        objective = elbo(bound[0], q)
        objective()  # makes the guide's parameters
        optimiser = torch.optim.Adam(objective.parameters(), lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            loss = objective()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            traces = [pyro.poutine.trace(q).get_trace() for _ in range(draws)]
        names = [n for n, _ in latent(pyro.poutine.trace(bound[0]).get_trace())]
        sites = {n: torch.stack([t.nodes[n]["value"] for t in traces]) for n in names}
        log_q = torch.stack([t.log_prob_sum().detach() for t in traces])[None]
    stats = {"loss": torch.full((1, draws), loss.item()), "log_q": log_q}
    return _gathered(bound, data, [sites], seed, dims or {}, stats)


def _gathered(
    bound: tuple[Joint, Method, Round],
    data: Federation,
    chains: Sequence[Tensors],
    seed: int,
    dims: Dims,
    stats: Tensors,
) -> Any:
    """Return all groups of draws for ArviZ.

    Each chain has its sites' draws as Pyro gives them, [S, *batch, *p]. Statistics are [chain, S],
    with "log_q" unless the draws follow the posterior.
    """
    joint, method, state = bound
    ids = torch.arange(data.clients)
    axes = ClientAxes(data, ids, method.shared, dims)
    draws = len(next(iter(chains[0].values())))
    made = []
    for chain, sites in enumerate(chains):
        with alone(data, seed, chain, 1):
            found = joint.groups(sites, axes, stream(seed, Stream.ROWS, Stream.SAMPLER, chain))
        # All clients' draws belong together, whether or not they share a site.
        known = found["sample_stats"]
        log_p = known["log_p"].value.reshape(draws, -1).sum(1)
        of_draws = {"log_p": log_p, "log_q": log_p} | {n: v[chain] for n, v in stats.items()}
        found["sample_stats"] = {n: Variable(v, ("draw",)) for n, v in of_draws.items()}
        asked = Asked(draws=draws, seed=seed + chain)
        found |= of_prior(axes, method, state, asked, lenient=True)
        made.append(found | {"constant_data": axes.constants()})
    return chained(made, data, ids)


def pooled(data: Federation) -> Federation:
    """Return a federation of one client that holds all training clients' rows."""
    rows = [torch.cat(part[: data.clients]) for part in (data.train, data.test)]
    return replace(
        data, train=(rows[0].unique(),), test=(rows[1].unique(),), names=("all",), held_out=0
    )
