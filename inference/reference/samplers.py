"""Reference inference: MCMC and SVI of the same Pyro program on all clients' data together.

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
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from math import inf, isfinite
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal

from pyrofl.arguments import Count, Positive, Whole, check_name, checked
from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import latent
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.hmc import Draws, approach
from pyrofl.inference.hmc import hmc as sampled
from pyrofl.inference.posteriors.arviz import of_prior, stack_chains
from pyrofl.inference.posteriors.axes import ClientAxes, Groups, Variable
from pyrofl.inference.posteriors.export import import_arviz
from pyrofl.inference.posteriors.pointwise import pointwise_at
from pyrofl.inference.reference.density import JointDensity
from pyrofl.inference.reference.joint import Joint, isolated_sampling, joint_model
from pyrofl.tensors import Tensors, cut
from pyrofl.turns import synchronized
from pyrofl.user_warnings import warn_user

Dims = Mapping[str, tuple[str, ...]]

# Spread of the starts; steps and learning rate of the ascent.
START_SPREAD, ASCENT_STEPS, ASCENT_LEARNING_RATE = 0.5, 50, 0.05
TUNING_PASSES, TUNING_DRAWS = 2, 8  # choices of the coordinates, and draws of each chain for them
THINNING, JITTER = 2, 0.8  # iterations per draw, and largest decrease of the step size
MIN_DRAWS = 4  # draws of a chain that R-hat and effective sample sizes need
TARGET_ACCEPTANCE = 0.9  # mean probability of acceptance
MAX_R_HAT, MIN_ESS, MAX_DIVERGING = 1.05, 400, 0.005  # MAX_DIVERGING: part of the trajectories


@checked
@synchronized
def hmc(
    model: Method | Program,
    data: Federation,
    draws: Count = 64,
    chains: Count = 64,
    seed: Whole = 0,
    *,
    state: RoundState | None = None,
    shared: str | None = None,
    dims: Dims | None = None,
) -> Any:
    """Sample the joint posterior of all clients by Hamiltonian Monte Carlo, many chains in a batch.

    This is usually many times faster than `nuts`. All chains share step size and metric, see
    `pyrofl.inference.hmc`; normal sites are sampled between their centered and non-centered form,
    see `pyrofl.inference.reference.density`.

    Args:
        model: as in `nuts`, as are data, seed, state, shared and dims. It is run at several points
            at once, like a program that is given several posterior draws.
        data: the federation.
        draws: number of draws of each chain, at least 4.
        chains: number of chains, at least about 32; more do not cost much time.
        seed: fixes all random numbers.
        state: a round of the method.
        shared: patterns of shared sites.
        dims: names of axes.

    Returns:
        As `nuts`. The attribute "r_hat" is the largest one of a coordinate, and "ess" the smallest
        effective sample size of all draws.

    Raises:
        ValueError: as `nuts`, if draws is below 4, or if the program cannot run at several points
            at once.

    Warns:
        UserWarning: if R-hat is above 1.05, if the effective sample size is below 400, or if
            0.5% of the trajectories or more have diverged: then the draws are unreliable.

    Examples:
        >>> exact = reference.hmc(model, data, shared="mu tau")  # doctest: +SKIP
        >>> reference.compare_posteriors(run, exact)  # doctest: +SKIP
    """
    _refuse_few(draws)
    joint = joint_model(model, data, state, seed, shared, dims)
    with isolated_sampling(data, seed):
        source = stream(seed, Stream.SAMPLER, 0)
        density = JointDensity.of(joint)
        start = _starts(density, chains, source)
        for _ in range(TUNING_PASSES):
            rough = sampled(density, start, source, TUNING_DRAWS, 1, JITTER, TARGET_ACCEPTANCE)
            density, w = density.centered(rough.u)
            start = w[-chains:]
        sample = sampled(density, start, source, draws, THINNING, JITTER, TARGET_ACCEPTANCE)
        with torch.no_grad():
            parts = [density.evaluate(some).values for some in sample.u.split(chains)]
    # Draws of one iteration are adjacent.
    sites = {n: torch.stack([part[n] for part in parts], 1) for n in parts[0]}
    diverging = sample.diverging.reshape(draws, chains).T  # [chains, draws], as sites
    quality = _check_quality(sample, chains)
    return _as_arviz(joint, sites, seed, dims or {}, {"diverging": diverging}, quality)


def _refuse_few(draws: int) -> None:
    """Raise ValueError if a chain has too few draws for its diagnostics."""
    if draws < MIN_DRAWS:
        raise ValueError(
            f"draws is {draws}; expected a whole number of at least {MIN_DRAWS}, which R-hat needs"
        )


def _starts(density: JointDensity, chains: int, source: torch.Generator) -> torch.Tensor:
    """Return a start for each chain [K, D], near its bulk."""
    noise = torch.randn(chains, len(density.power), generator=source, dtype=torch.float64)
    w = (START_SPREAD * noise).to(density.power).requires_grad_()
    climb = torch.optim.Adam([w], ASCENT_LEARNING_RATE)
    for _ in range(ASCENT_STEPS):
        (slope,) = torch.autograd.grad(-density(w).nan_to_num(0.0, 0.0, 0.0).sum(), w)
        w.grad = slope.nan_to_num(0.0, 0.0, 0.0)
        climb.step()
    return approach(density, w.detach(), source)


def _check_quality(sample: Draws, chains: int) -> dict[str, float]:
    """Return R-hat and the effective sample size; warn if these or divergences are bad."""
    # [D, chains, draws]
    each = sample.u.unflatten(0, (-1, chains)).permute(2, 1, 0).double().numpy()
    az = import_arviz()
    ess, diverged = (
        min(float(az.ess(one)) for one in each),
        float(sample.diverging.double().mean()),
    )
    if not sample.r_hat <= MAX_R_HAT or not ess >= MIN_ESS or diverged >= MAX_DIVERGING:
        warn_user(
            f"the draws are unreliable: R-hat is {sample.r_hat:.2f} (at most {MAX_R_HAT} is good), "
            f"the effective sample size of {len(sample.u):,} draws is {ess:.0f} ({MIN_ESS} are "
            f"sufficient), and {diverged:.1%} of the trajectories diverged (below "
            f"{MAX_DIVERGING:.1%} is good); take more draws, reparametrize the program, or compare "
            "with reference.nuts"
        )
    return {"r_hat": sample.r_hat, "ess": ess}


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
        draws: number of draws of each chain, at least 4.
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
        ValueError: if the model fails on the data, or reads tensors and no state is given; if
            shared or dims name no site, the prior of a shared site differs between clients, the
            support of a site depends on another site, draws is below 4, or an option is unknown.
    """
    _refuse_few(draws)
    for name in options:
        check_name(name, [*signature(NUTS).parameters], "argument of NUTS")
    joint = joint_model(model, data, state, seed, shared, dims)
    with isolated_sampling(data, seed):
        joint.refuse_moving_supports()
    chain_draws, diverging = [], torch.zeros(chains, draws, dtype=torch.bool)
    for chain in range(chains):
        with isolated_sampling(data, seed, chain), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
            kernel = NUTS(joint, jit_compile=jit, ignore_jit_warnings=True, **options)
            sampler = MCMC(kernel, draws, warmup_steps=warmup, disable_progbar=True)
            sampler.run()
        chain_draws.append(sampler.get_samples())
        diverging[chain, sampler.diagnostics()["divergences"]["chain 0"]] = True
    # [chains, draws, ...]
    sites = {n: torch.stack([one[n] for one in chain_draws]) for n in chain_draws[0]}
    return _as_arviz(joint, sites, seed, dims or {}, {"diverging": diverging})


@checked
@synchronized
def centralized(
    model: Method | Program,
    data: Federation,
    draws: Count = 1000,
    seed: Whole = 0,
    *,
    guide: Callable[..., Any] = AutoMultivariateNormal,
    steps: Count = 2000,
    lr: Positive = 0.02,
    num_particles: Count = 16,
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
        num_particles: Monte Carlo draws of the ELBO.
        state: a round of the method.
        shared: patterns of shared sites.
        dims: names of axes.

    Returns:
        As `nuts`, with one chain; log_q is the guide's, and sample_stats has the last loss.

    Raises:
        ValueError: as `nuts`, or if the loss is not finite.

    Warns:
        UserWarning: if the loss has risen.
    """
    joint = joint_model(model, data, state, seed, shared, dims)
    with isolated_sampling(data, seed):
        joint.refuse_moving_supports()
    with isolated_sampling(data, seed), pyro.settings.context(module_local_params=True):
        q = guide(joint)
        elbo: Any = Trace_ELBO(num_particles, max_plate_nesting=2, vectorize_particles=True)
        objective = elbo(joint, q)
        objective()  # creates the guide's parameters
        optimizer = torch.optim.Adam(objective.parameters(), lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        begin = inf
        for step in range(steps):
            optimizer.zero_grad()
            loss = objective()
            begin = begin if step else loss.item()
            loss.backward()
            optimizer.step()
            schedule.step()
        _check_loss(begin, loss.item())
        with torch.no_grad():
            traces = [poutine.trace(q).get_trace() for _ in range(draws)]
        names = [n for n, _ in latent(poutine.trace(joint).get_trace())]
        sites = {n: torch.stack([t.nodes[n]["value"] for t in traces])[None] for n in names}
        log_q = torch.stack([t.log_prob_sum().detach() for t in traces])[None]  # [1, draws]
    stats = {"loss": torch.full((1, draws), loss.item()), "log_q": log_q}
    return _as_arviz(joint, sites, seed, dims or {}, stats)


def _check_loss(begin: float, end: float) -> None:
    """Warn if the loss of an optimization has risen; raise ValueError if it is not finite."""
    if not isfinite(end):
        raise ValueError(f"the loss is {end} after the last step; lower lr")
    if end > begin + max(1.0, abs(begin)):
        warn_user(
            f"the loss has risen from {begin:.4g} to {end:.4g}, so that the draws are unreliable; "
            "lower lr, or take more steps"
        )


@checked
def pooled(data: Federation) -> Federation:
    """Return a federation with a single client that has all training clients' rows."""
    train, test = (torch.cat(part[: data.clients]).unique() for part in (data.train, data.test))
    return replace(data, train=(train,), test=(test,), names=("all",), held_out=0)


def _as_arviz(
    joint: Joint,
    sites: Tensors,
    seed: int,
    dims: Dims,
    stats: Tensors,
    quality: Mapping[str, float] | None = None,
) -> Any:
    """Convert draws and sampler statistics to ArviZ data with all groups.

    Draws are [chain, S, *batch, *p], statistics [chain, S].
    """
    method, data, ids = joint.method, joint.data, joint.batch.ids
    axes = ClientAxes(data, ids, method.shared, dims)
    chains, draws = next(iter(sites.values())).shape[:2]
    count = chains * draws
    with isolated_sampling(data, seed, 0, 1):
        joint_sites = joint.sites()
        source = stream(seed, Stream.ROWS, Stream.SAMPLER)
        values = {n: s.laid(sites[n].reshape(count, -1), len(ids)) for n, s in joint_sites.items()}
        clients = []
        for c in range(len(ids)):
            one = slice(c, c + 1)
            client_values = {
                n: s.of(values[n], c, len(data.train[c])) for n, s in joint_sites.items()
            }
            received, local = (cut(v, one) for v in (joint.received, joint.local))
            what = (received, local, data.batch(ids[one]))
            clients.append(pointwise_at(method.model, method.shared, client_values, what, source))
        groups = axes.groups(clients)
    # All clients' draws belong together, whether or not they share a site.
    log_p = groups["sample_stats"]["log_p"].value.reshape(count, -1).sum(1)
    of_draws = {"log_p": log_p, "log_q": log_p} | {n: v.flatten() for n, v in stats.items()}
    groups["sample_stats"] = {n: Variable(v, ("draw",)) for n, v in of_draws.items()}
    spec = EvaluationSpec(draws=count, seed=seed)
    groups |= of_prior(axes, method, joint.state, spec, lenient=True)
    groups["constant_data"] = axes.constants()
    return stack_chains(
        [_of_chain(groups, i, draws) for i in range(chains)], data, ids, attrs=quality
    )


def _of_chain(groups: Groups, chain: int, draws: int) -> Groups:
    """Return the ArviZ groups of one chain, of draws of all chains one after the other."""
    some = slice(chain * draws, (chain + 1) * draws)
    return {
        group: {
            n: Variable(v.value[some], v.axes) if v.axes[:1] == ("draw",) else v
            for n, v in variables.items()
        }
        for group, variables in groups.items()
    }
