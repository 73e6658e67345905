"""Reference inference: NUTS and SVI of the same Pyro program on all clients' data together.

A user's program is written once, for clients that each have their own copy of shared sites:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrofl.arguments import Count, Positive, Whole, checked
from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import is_made, latent, with_rows
from pyrofl.inference.engine.server_round import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.metadata import SHARED, Metadata
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.arviz import chained, of_prior
from pyrofl.inference.posteriors.axes import ClientAxes, Variable
from pyrofl.inference.posteriors.draws import Values, of_rows
from pyrofl.inference.posteriors.pointwise import pointwise_at
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.inference.training.noise import Message, open_latent
from pyrofl.tensors import Tensors, cut, default_type, matches, seeded
from pyrofl.turns import synchronized

Dims = Mapping[str, tuple[str, ...]]


@checked
@synchronized
def nuts(
    model: Method | Program,
    data: Federation,
    draws: Count = 1000,
    warmup: Whole = 1000,
    chains: Count = 4,
    seed: Whole = 0,
    *,
    state: RoundState | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
    jit: bool = False,
    **options: Any,
) -> Any:
    """Sample the joint posterior of all clients by Pyro's NUTS; chains run one after the other.

    Args:
        model: a program (received, local, batch), or a method for its model.
        data: the federation; draws have its floating-point type, and float64 is worth its time.
        draws: number of draws of each chain.
        warmup: warm-up steps of each chain.
        chains: number of chains.
        seed: fixes all random numbers.
        state: a round of the method, for a model that reads tensors of the server or the client.
        shared: patterns of the shared sites; default the method's, or none.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
        jit: compile the density: about three times faster, for programs whose Python control
            flow depends on no latent value.
        options: further arguments of `pyro.infer.NUTS`, such as target_accept_prob.

    Returns:
        The groups of `Run.to_arviz` with groups="all"; log_p and log_q in sample_stats are equal,
        as these are draws of the posterior, and sample_stats also has `diverging`.

    Raises:
        ValueError: if the model reads tensors and no state is given, or the prior of a shared site
            differs between clients.
    """
    joint = joined(model, data, state, seed, shared)
    found, diverging = [], torch.zeros(chains, draws, dtype=torch.bool)
    for chain in range(chains):
        with alone(data, seed, chain), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
            kernel = NUTS(joint, jit_compile=jit, ignore_jit_warnings=True, **options)
            sampler = MCMC(kernel, draws, warmup_steps=warmup, disable_progbar=True)
            sampler.run()
        found.append(sampler.get_samples())
        diverging[chain, sampler.diagnostics()["divergences"]["chain 0"]] = True
    return _gathered(joint, found, seed, dims or {}, {"diverging": diverging})


@checked
@synchronized
def centralised(
    model: Method | Program,
    data: Federation,
    draws: Count = 1000,
    seed: Whole = 0,
    *,
    guide: Callable[..., Any] = AutoMultivariateNormal,
    steps: Count = 2000,
    lr: Positive = 0.02,
    particles: Count = 16,
    state: RoundState | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
) -> Any:
    """Fit the joint posterior of all clients by SVI with an automatic guide, and sample it.

    Compared with NUTS and a federated fit, it separates the error of the guide from that of
    federation.

    Args:
        model: as in `nuts`, as are data, seed, state, shared and dims.
        data: the federation.
        draws: number of draws from the guide.
        seed: fixes all random numbers.
        guide: function that creates an automatic guide of a model.
        steps: steps of Adam; its learning rate decays to zero.
        lr: initial learning rate.
        particles: Monte Carlo draws of the ELBO.
        state: a round of the method.
        shared: patterns of shared sites.
        dims: names of axes.

    Returns:
        As `nuts`, with one chain; log_q is the guide's, and sample_stats has the last loss.

    Raises:
        ValueError: as `nuts`.
    """
    joint = joined(model, data, state, seed, shared)
    with alone(data, seed), pyro.settings.context(module_local_params=True):
        q = guide(joint)
        elbo: Any = Trace_ELBO(particles, max_plate_nesting=2, vectorize_particles=True)
        objective = elbo(joint, q)
        objective()  # creates the guide's parameters
        optimiser = torch.optim.Adam(objective.parameters(), lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            loss = objective()
            loss.backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            traces = [poutine.trace(q).get_trace() for _ in range(draws)]
        names = [n for n, _ in latent(poutine.trace(joint).get_trace())]
        sites = {n: torch.stack([t.nodes[n]["value"] for t in traces]) for n in names}
        log_q = torch.stack([t.log_prob_sum().detach() for t in traces])[None]
    stats = {"loss": torch.full((1, draws), loss.item()), "log_q": log_q}
    return _gathered(joint, [sites], seed, dims or {}, stats)


def pooled(data: Federation) -> Federation:
    """Return a federation with a single client that has all training clients' rows."""
    train, test = (torch.cat(part[: data.clients]).unique() for part in (data.train, data.test))
    return replace(data, train=(train,), test=(test,), names=("all",), held_out=0)


class OnePrior(dist.TorchDistribution):
    """Prior of a shared site, defined by the first client of a distribution with a client axis."""

    arg_constraints = {}  # noqa: RUF012 (as every distribution of Pyro has it)

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        shape = torch.Size((*fn.batch_shape[:-2], 1, *fn.batch_shape[-1:]))
        super().__init__(shape, fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """Support of the prior distribution, which is equal for all clients."""
        return self.fn.support

    def expand(self, batch_shape: Any, _instance: Any = None) -> OnePrior:
        """Return a copy of the prior with its last batch axis expanded to the given shape."""
        return OnePrior(self.fn.expand((*self.fn.batch_shape[:-1], batch_shape[-1])))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values from the first client's prior."""
        value: Tensor = self.fn(sample_shape)
        return value.narrow(value.dim() - self.event_dim - 2, 0, 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of a value under the first client's prior."""
        density: Tensor = self.fn.log_prob(value)
        return density[..., :1, :]

    def agrees(self, value: Tensor) -> bool:
        """Return whether a value has the same log density under the priors of all clients."""
        density = self.fn.log_prob(value)
        return torch.allclose(density, density[..., :1, :].expand_as(density), equal_nan=True)


class OncePlate(pyro.plate):
    """Pyro plate over clients in which shared sites are sampled once instead of per client."""

    shared = ""

    def _lets_go(self, msg: Message) -> bool:
        made = msg["type"] != "sample" or is_made(msg)
        return not made and matches(msg["name"], self.shared)

    def _process_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._process_message(msg)
            return
        if msg["fn"].batch_shape[:-1].numel() > 1:
            msg["fn"] = OnePrior(msg["fn"])

    def _postprocess_message(self, msg: Message) -> None:
        if not self._lets_go(msg):
            super()._postprocess_message(msg)
            return
        # The enclosing traces have recorded the single value by now.
        lead = msg["value"].dim() - msg["fn"].event_dim
        batch = torch.broadcast_shapes(msg["value"].shape[:lead], (self.size, 1))
        msg["value"] = msg["value"].expand(batch + msg["value"].shape[lead:])


@dataclass(frozen=True)
class Everybody(Batch):
    """Batch of all rows of all clients, whose client plate samples shared sites only once."""

    shared: str = ""

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, at dim -2, with shared sites sampled once."""
        plate = OncePlate("clients", len(self.ids), dim=-2)
        plate.shared = self.shared
        return plate


class Site(NamedTuple):
    """Shape of a latent site, and whether its values differ between clients and rows."""

    own: bool  # whether every client has its own value
    rows: bool  # whether every row has its own value
    places: int  # along the last axis of its batch shape
    event: torch.Size

    def laid(self, flat: Tensor, clients: int) -> Tensor:
        """Reshape flattened draws [S, ...] to [draws, clients or 1, rows or entries, *event]."""
        return flat.reshape(len(flat), clients if self.own else 1, self.places, *self.event)

    def of(self, value: Tensor, client: int, rows: int) -> Values:
        """Extract one client's values of a site from all clients' draws, without padding rows."""
        mine = value[:, [client if self.own else 0]]
        return Values(mine[:, :, :rows] if self.rows else mine, self.rows)


class RowsKept(Messenger):
    """Pyro messenger that removes masks of latent sites in padding rows, for a proper density."""

    def _pyro_sample(self, msg: Message) -> None:
        if open_latent(msg) and of_rows(msg):
            msg["mask"] = None
            while isinstance(msg["fn"], dist.MaskedDistribution):
                msg["fn"] = msg["fn"].base_dist


@dataclass(frozen=True)
class Joint:
    """Joint model of all clients: a method's model bound to its inputs and to all rows."""

    method: Method
    data: Federation
    state: RoundState
    received: Tensors
    local: Tensors
    batch: Everybody

    def __call__(self) -> Any:
        """Run the model on all clients' rows."""
        received, local = (with_rows(v, len(self.batch)) for v in (self.received, self.local))
        with RowsKept():
            return self.method.model(received, local, self.batch)

    def sites(self) -> dict[str, Site]:
        """Return the shape of each latent site of the model, by site name."""
        try:
            trace = poutine.trace(self).get_trace()
        except KeyError as error:
            missing = str(error.args[0]).splitlines()[0]  # Pyro adds lines about shapes
            raise ValueError(
                f"the model reads {missing} of the server or its clients; pass state, a round of "
                "the method"
            ) from error
        found = {}
        for name, site in latent(trace):
            if isinstance(site["fn"], OnePrior) and not site["fn"].agrees(site["value"]):
                raise ValueError(
                    f"the prior of {name!r} differs between clients, but the site is shared; it "
                    "must only depend on shared sites and constants"
                )
            frames = {frame.name for frame in site["cond_indep_stack"]}
            own, rows, fn = "clients" in frames, "rows" in frames, site["fn"]
            found[name] = Site(own, rows, fn.batch_shape[-1:].numel(), fn.event_shape)
        return found


def joined(
    model: Method | Program,
    data: Federation,
    state: RoundState | None,
    seed: Seed,
    shared: str | None,
) -> Joint:
    """Return the joint model of all training clients; sites without a client axis become shared."""
    method = model if isinstance(model, Method) else _bare(model)
    if state is None:  # the model reads nothing
        method = _bare(method.model, method.shared)
        state = first(method, data, seed)
    ids = torch.arange(data.clients)
    received, view = prepared(method, data, state, data.cohort(ids), seed=seed)
    if isinstance(view, list):
        raise ValueError("the method's main view is an ensemble; pass a method with a single model")
    once = method.shared if shared is None else shared
    batch = Everybody(**vars(data.batch(ids)), shared=once)
    joint = Joint(method, data, state, received, view, batch)
    with alone(data, seed):
        common = " ".join([once, *(n for n, site in joint.sites().items() if not site.own)])
    metadata = method.metadata.extend({common.strip(): SHARED})
    return replace(joint, method=replace(method, metadata=metadata))


def _bare(model: Program, shared: str = "") -> Method:
    """Return a `Method` that consists of a model only, without training."""
    return Method(
        init=lambda generator, clients: {},
        model=model,
        guide=model,
        phases=(),
        aggregate=lambda server, message, cohort, generator: server,
        metadata=Metadata({shared: SHARED}),
    )


@contextmanager
def alone(data: Federation, seed: Seed, *key: int) -> Iterator[None]:
    """Context manager that sets seed, data type and an empty parameter store for Pyro samplers."""
    source = int(torch.randint(2**62, (), generator=stream(seed, Stream.SAMPLER, *key)))
    unchecked, scope = pyro.validation_enabled(False), pyro.get_param_store().scope()
    with seeded(source), default_type(data.dtype), unchecked, scope:
        yield


def _gathered(
    joint: Joint, chains: Sequence[Tensors], seed: int, dims: Dims, stats: Tensors
) -> Any:
    """Convert each chain's draws and sampler statistics to ArviZ data with all groups.

    Draws are [S, *batch, *p], statistics [chain, S].
    """
    method, data, ids = joint.method, joint.data, joint.batch.ids
    axes = ClientAxes(data, ids, method.shared, dims)
    draws = len(next(iter(chains[0].values())))
    made = []
    for chain, sites in enumerate(chains):
        with alone(data, seed, chain, 1):
            known = joint.sites()
            source = stream(seed, Stream.ROWS, Stream.SAMPLER, chain)
            values = {n: s.laid(sites[n].reshape(draws, -1), len(ids)) for n, s in known.items()}
            clients = []
            for c in range(len(ids)):
                one = slice(c, c + 1)
                mine = {n: s.of(values[n], c, len(data.train[c])) for n, s in known.items()}
                received, local = (cut(v, one) for v in (joint.received, joint.local))
                what = (received, local, data.batch(ids[one]))
                clients.append(pointwise_at(method.model, method.shared, mine, what, source))
            found = axes.groups(clients)
        # All clients' draws belong together, whether or not they share a site.
        log_p = found["sample_stats"]["log_p"].value.reshape(draws, -1).sum(1)
        of_draws = {"log_p": log_p, "log_q": log_p} | {n: v[chain] for n, v in stats.items()}
        found["sample_stats"] = {n: Variable(v, ("draw",)) for n, v in of_draws.items()}
        asked = EvaluationSpec(draws=draws, seed=seed + chain)
        found |= of_prior(axes, method, joint.state, asked, lenient=True)
        made.append(found | {"constant_data": axes.constants()})
    return chained(made, data, ids)
