"""`Method.to_pyro` of hierarchical programs: what a client of PVI fits, with its own variables."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from torch import Tensor

import pyrofl
from pyrofl import federate
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.pyro_pair import PyroPair
from pyrofl.models import guides, likelihood_factors, pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.tensors import Tensors

SIZES = (4, 1, 6)
CLIENT = 2
SD, TAU = 0.8, 1.5


@pytest.fixture(autouse=True)
def _store():
    with pyro.get_param_store().scope():
        yield


def data() -> Federation:
    """Return three clients with responses around 2, and indicators of three groups of rows."""
    source = torch.Generator().manual_seed(3)
    y = 2.0 + torch.randn(sum(SIZES), generator=source, dtype=torch.float64)
    x = torch.eye(3, dtype=torch.float64).repeat(4, 1)[: sum(SIZES)]
    rows = list(torch.arange(sum(SIZES)).split(SIZES))
    return Federation(x, y, rows, [one[:0] for one in rows])


def known_scales(received: Tensors, local: Tensors, batch: Batch) -> None:
    """A normal program: theta_j around mu."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.5, 3.0))
        theta = pyro.sample("theta", dist.Normal(mu, TAU))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, SD), obs=batch.y)


def learned_scale(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Own variables are stated without their scale, and have powers of it."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.5, 3.0))
        tau = pyro.sample("tau", dist.HalfCauchy(2.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, SD), obs=batch.y)


def shared_effects(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Effects that clients share with their scale, in a plate; they are partly centered."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        with pyro.plate("groups", 3, dim=-1):
            a = pyro.sample("a", dist.Normal(1.0, tau))
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with batch.rows():
            of_row = batch.x @ a[..., None]  # x [C, B, 3] has a 1 for a row's group
            pyro.sample("y", dist.Normal(theta + of_row[..., 0], SD), obs=batch.y)


def own_rows(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Two variables of each row."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.5, 3.0))
        with batch.rows():
            theta = pyro.sample("theta", dist.Normal(mu, TAU))
            sd = pyro.sample("sd", dist.LogNormal(0.0, 0.5))
            pyro.sample("y", dist.Normal(theta, sd), obs=batch.y)


PROGRAMS = {
    "known scales": (known_scales, "mu", {}),
    "powers": (learned_scale, "mu tau", {}),
    "blocks": (learned_scale, "mu tau", {"covariance": "blocks"}),
    "diagonal": (learned_scale, "mu tau", {"covariance": "diagonal"}),
    "shared effects": (shared_effects, "tau a", {}),
    "rows": (own_rows, "mu", {}),
}


def drawn(method: Method, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Return the noise of a client's step, as the first update of its phase draws it."""
    torch.manual_seed(0)
    found: Tensors = method.phases[-1].updates[0](received, local, batch)
    return {"noise": found["noise"]}


def loss_of(pair: PyroPair, noise: Tensor) -> Tensor:
    """Return the negative ELBO of a pair for given noise [C, S, n] of its guide."""
    d = poutine.trace(pair.guide).get_trace().nodes["_shared"]["value"].shape[-1]
    e = noise.movedim(1, 0)[:, :, None]
    fixed = poutine.condition(pair.guide, {"_shared": e[..., :d], "_own": e[..., d:]})
    with pyro.plate("draws", len(e), dim=-3):
        q = poutine.trace(fixed).get_trace()
        p = poutine.trace(poutine.replay(pair.model, trace=q)).get_trace()
    return (q.log_prob_sum() - p.log_prob_sum()).detach() / len(e)


def moved(local: Tensors) -> Tensors:
    """Change all parameters in Pyro's store, and return the local tensors with these values."""
    store = pyro.get_param_store()
    for n in list(store.keys()):
        store[n] = 0.9 * store[n].detach() + 0.02 * (store[n].detach().abs() > 1e-9)
    local = local | {n: v.detach() for n, v in store.items()}
    return local | ({"root": local["log_root"].exp()} if "log_root" in local else {})


@pytest.mark.parametrize(
    ("name", "client"), [("powers", "client 2"), *((name, None) for name in PROGRAMS)]
)
def test_the_pair_has_the_loss_that_clients_minimize(name, client):
    """With the same noise, at the start of a round and at other parameters."""
    program, shared, settings = PROGRAMS[name]
    rows, method = (
        data(),
        pvi.hierarchical(program, data(), shared=shared, num_particles=8, steps=5, **settings),
    )
    *_, state = federate(method, rows, 3)
    ids = torch.arange(3) if client is None else torch.tensor([CLIENT])
    batch, own = rows.batch(ids), method.metadata.pair
    received, local = client_inputs(method, rows, state, rows.cohort(ids), 0)
    local = own.start(received, local | received, batch)
    pair = method.to_pyro(rows, client, state)
    step = method.phases[-1].updates[1]
    local = local | drawn(method, received, local, batch)
    for _ in range(2):
        found = loss_of(pair, local["noise"])
        loss = step.loss(method.model, method.guide, received, local, batch).sum().detach()
        torch.testing.assert_close(found, loss, rtol=1e-8, atol=1e-8)
        local = moved(local)


def closed_form(server: Tensors) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of mu and theta of a client of `known_scales`."""
    own = {n: server[n] - server[f"server/{n}"][CLIENT] for n in ("shift", "precision")}
    y = data().y[-SIZES[CLIENT] :]
    within = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64) / TAU**2
    rows = torch.tensor([0.0, len(y) / SD**2], dtype=torch.float64)
    cavity = torch.tensor([float(own["precision"]), 0.0], dtype=torch.float64)
    covariance = torch.linalg.inv(within + torch.diag(rows + cavity))
    pull = torch.tensor([float(own["shift"]), float(y.sum()) / SD**2], dtype=torch.float64)
    return covariance @ pull, covariance


@pytest.mark.slow
def test_nuts_on_the_pair_is_the_closed_form_that_a_client_reaches():
    method = pvi.hierarchical(known_scales, data(), shared="mu", damping=0.5, steps=1)
    *_, before, after = federate(method, data(), 3)
    mean, covariance = closed_form(before.server)
    root = after.client_states["root"][CLIENT]
    torch.testing.assert_close(after.client_states["mean"][CLIENT], mean)
    torch.testing.assert_close(root @ root.T, covariance)
    pyro.set_rng_seed(0)
    model, _ = method.to_pyro(data(), f"client {CLIENT}", before)
    chain = MCMC(NUTS(model), num_samples=300, warmup_steps=100, disable_progbar=True)
    chain.run()
    draws = torch.stack([chain.get_samples()[n].flatten() for n in ("mu", "theta")], 1)
    sd = covariance.diagonal().sqrt()
    # Five Monte Carlo standard errors of about 150 effective draws.
    assert bool(((draws.mean(0) - mean).abs() < 5 * sd / 150**0.5).all())
    torch.testing.assert_close(draws.std(0), sd, rtol=5 / 300**0.5, atol=0)


def test_the_model_is_the_likelihood_under_the_cavity():
    """Of a positive site, with a prior that is not normal: the density of its logarithm."""
    method = pvi.hierarchical(
        learned_scale, data(), shared="mu tau", covariance="diagonal", steps=3
    )
    *_, state = federate(method, data(), 2)
    model, _ = method.to_pyro(data(), f"client {CLIENT}", state)
    at = {"mu": 1.2, "tau": 0.7, "theta": 2.1}
    values = {n: torch.full((1, 1), v, dtype=torch.float64) for n, v in at.items()}
    found = poutine.trace(poutine.condition(model, values)).get_trace().log_prob_sum()
    server, normal = state.server, Normals(2, full=False)
    u = torch.tensor([at["mu"], math.log(at["tau"])], dtype=torch.float64)
    cavity = {n: server[n] - server[f"server/{n}"][CLIENT] for n in ("shift", "precision")}
    p0 = {n: server[n] - server[f"server/{n}"].sum(0) for n in ("shift", "precision")}
    prior = dist.Normal(0.5, 3.0).log_prob(u[0]) + dist.HalfCauchy(2.0).log_prob(u[1].exp()) + u[1]
    expected = normal.log_density(u, cavity) - u[1] + (prior - normal.log_density(u, p0)) / 3
    expected = expected + dist.Normal(at["mu"], at["tau"]).log_prob(values["theta"])
    expected = expected + dist.Normal(values["theta"], SD).log_prob(data().y[-6:]).sum()
    torch.testing.assert_close(found, expected.squeeze())


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
def test_svi_trains_the_parameters_and_predicts(loss):
    method = pvi.hierarchical(learned_scale, data(), shared="mu tau")
    model, guide = method.to_pyro(data())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), loss(num_particles=4))
    first, *_, last = [svi.step() for _ in range(40)]
    assert last < first
    assert set(pyro.get_param_store()) == {"mean", "root", "power"}
    predict = Predictive(poutine.uncondition(model), guide=guide, num_samples=5, parallel=True)
    assert predict()["y"].shape == (5, 3, max(SIZES))


def test_what_has_no_pair_says_why():
    rows = data()
    for method, why in (
        (pvi.hierarchical(known_scales, rows, shared="mu", guide=guides.copula), "gradients"),
        (likelihood_factors.hierarchical(known_scales, rows, shared="mu"), "normal approximations"),
        (pyrofl.hierarchical(known_scales, rows, shared="mu"), "normal approximations"),
    ):
        with pytest.raises(ValueError, match=rf"to_pyro of .* {why} .*; use .*to_arviz"):
            method.to_pyro(rows)
