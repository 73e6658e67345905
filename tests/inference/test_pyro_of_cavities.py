"""`Method.to_pyro` of methods whose clients fit their likelihood under a cavity distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from regressions import TASK, Two
from torch import Tensor, nn

from pyrofl import federate, fit
from pyrofl.inference.engine.state import RoundState
from pyrofl.models import fedep, fedgvi, guides, likelihoods, pfedvem, priors, pvi, virtual
from pyrofl.models.shared.gaussians import Normals, balance_noise
from pyrofl.nets import Network

NET = Network(nn.Sequential(nn.Linear(3, 1, bias=False)))
WEIGHTS: Any = {
    "prior": priors.fixed(dist.Normal, 0.5, 0.8),
    "likelihood": likelihoods.normal(0.7),
}
CLIENT = 1
FULL = {"covariance": "full", "lr": 1.0, "epochs": 1, "damping": 1.0}
EXACT = {
    "pvi": lambda: pvi.build(NET, **WEIGHTS, **FULL),
    "fedep": lambda: fedep.build(
        NET, **WEIGHTS, guide=guides.full_covariance, moments="natural", lr=1.0, epochs=1,
        damping=0.5, batch=None,
    ),
    "fedep: stateless": lambda: fedep.build(
        NET, **WEIGHTS, guide=guides.full_covariance, moments="natural", lr=1.0, epochs=1,
        damping=0.5, batch=None, stateless=True,
    ),
    "virtual": lambda: virtual.build(
        Network(Two(), head="own"), **WEIGHTS, guide=guides.full_covariance, lr=1.0, epochs=1,
        damping=0.5,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _store():
    with pyro.get_param_store().scope():
        yield


def two(method: Any, rounds: int = 1) -> tuple[RoundState, RoundState]:
    """Return the states after some rounds and after one more."""
    *_, before, after = federate(method, TASK.federation, rounds + 1)
    return before, after


def closed_form(method: Any, server: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and precision of a client's likelihood times its cavity.

    Weights that a client does not share have their prior.
    """
    cohort = TASK.federation.cohort(torch.tensor([CLIENT]))
    cavity = {n: v[0] for n, v in method.download(server, cohort).items()}
    d = len(cavity["shift"])
    normal = Normals(d, full=len(cavity["precision"]) > d)
    precision = cavity["precision"]
    precision = normal.matrix(precision) if normal.full else precision.diag()
    own = torch.full((3 - d,), 0.8**-2, dtype=torch.float64)
    precision = torch.block_diag(precision, own.diag())
    shift = torch.cat([cavity["shift"], 0.5 * own])
    rows = TASK.federation.train[CLIENT]
    x, y = TASK.federation.x[rows], TASK.federation.y[rows]
    total = precision + x.T @ x / 0.7**2
    return torch.linalg.solve(total, shift + x.T @ y / 0.7**2), total


class Balanced(Messenger):
    """Noise with exact second moments, under which gradients of normal models have no noise."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in ("_shared", "_own"):
            source, d = torch.Generator().manual_seed(0), msg["fn"].event_shape[0]
            noise = torch.randn(*msg["fn"].batch_shape, 3, generator=source, dtype=torch.float64)
            both = balance_noise(noise)  # of what clients share first
            msg["value"] = both[..., :d] if msg["name"] == "_shared" else both[..., 3 - d :]
            msg["done"] = True


def optimize(pair: Any, loss: Any = Trace_ELBO) -> None:
    """Minimize the loss by SVI under balanced noise."""
    elbo = loss(num_particles=16, vectorize_particles=True, max_plate_nesting=2)
    decay = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.985}
    optim = pyro.optim.ExponentialLR(decay)
    svi = SVI(pair.model, pair.guide, optim, elbo)
    for _ in range(600):
        with Balanced():
            svi.step()
        optim.step()


@pytest.mark.parametrize("name", EXACT)
def test_svi_by_hand_equals_what_a_client_trains(name):
    """A natural-gradient step of lr=1 is the optimum, to which SVI by hand comes as well."""
    method = EXACT[name]()
    before, after = two(method)
    pair = method.to_pyro(TASK.federation, TASK.federation.names[CLIENT], before)
    optimize(pair)
    mean, root = (pyro.param(n).detach()[0] for n in ("mean", "root"))
    expected, precision = closed_form(method, before.server)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(precision), rtol=0.01, atol=1e-5)
    if "stateless" not in name:  # these forget
        states = after.get_client_states(torch.tensor([CLIENT]))
        mean, root = states["mean"][0], states["root"][0]
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(root @ root.mT, torch.linalg.inv(precision))


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("build", [pvi.build, fedgvi.build])
def test_svi_of_independent_normals_equals_what_a_client_trains(build, loss):
    """The optimum is the exact mean, with conditional standard deviations."""
    own = {"loss": "log", "divergence": "kl"} if build is fedgvi.build else {}
    method = build(NET, **WEIGHTS, **own, warm_start=0)
    state, _ = two(method)
    optimize(method.to_pyro(TASK.federation, TASK.federation.names[CLIENT], state), loss)
    mean, precision = closed_form(method, state.server)
    torch.testing.assert_close(pyro.param("mean").detach()[0], mean, rtol=0, atol=1e-3)
    sd = pyro.param("log_root").detach()[0].exp()
    torch.testing.assert_close(sd, precision.diagonal().rsqrt(), rtol=0.01, atol=0)


NORMAL = {
    "pvi: full": EXACT["pvi"],
    "pvi: diagonal": lambda: pvi.build(NET, **WEIGHTS, warm_start=0),
    "virtual": EXACT["virtual"],
}


@pytest.mark.parametrize("name", NORMAL)
def test_nuts_on_the_pair_is_the_closed_form(name):
    method = NORMAL[name]()
    state, _ = two(method)
    model, _ = method.to_pyro(TASK.federation, TASK.federation.names[CLIENT], state)
    mean, precision = closed_form(method, state.server)
    pyro.set_rng_seed(0)
    chain = MCMC(NUTS(model), num_samples=300, warmup_steps=100, disable_progbar=True)
    chain.run()
    draws = torch.cat([v.flatten(1) for _, v in sorted(chain.get_samples().items())], 1)
    covariance = torch.linalg.inv(precision)
    sd = covariance.diagonal().sqrt()
    # Five Monte Carlo standard errors of about 150 effective draws.
    assert bool(((draws.mean(0) - mean).abs() < 5 * sd / 150**0.5).all())
    torch.testing.assert_close(draws.std(0), sd, rtol=5 / 300**0.5, atol=0)


def test_a_prior_that_is_not_normal_counts_by_the_share_of_a_client():
    """The factors of all clients' priors multiply to the prior."""
    prior = priors.fixed(dist.Laplace, 0.5, 0.8)
    method = pvi.build(NET, prior=prior, likelihood=likelihoods.normal(0.7))
    data = TASK.federation
    w = {"0.weight": torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)}
    (state,) = federate(method, data, 1)
    model, _ = method.to_pyro(data, None, state)
    trace = pyro.poutine.trace(pyro.poutine.condition(model, w)).get_trace()
    trace.compute_log_prob()
    found = (trace.nodes["cavity"]["log_prob"] + trace.nodes["0.weight"]["log_prob"]).squeeze(1)
    server = state.server
    cavity = method.download(server, data.cohort(torch.arange(data.clients)))
    normal = Normals(3, full=False)
    log_p = dist.Laplace(0.5, 0.8).log_prob(w["0.weight"]).sum()
    # The normal that stands for the prior is that of the server divided by all factors.
    factors = {n: server[f"server/{n}"].sum(0) for n in ("shift", "precision")}
    p0 = {n: server[n] - v for n, v in factors.items()}
    zero = normal.log_density(w["0.weight"][0], p0)
    expected = normal.log_density(w["0.weight"], cavity) + (log_p - zero) / data.clients
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_improper_cavity_is_refused():
    data = TASK.federation
    method = pvi.build(NET, **WEIGHTS, warm_start=0)
    run = fit(method, data, 1, progress=False)
    server = dict(run.state.server)
    server["server/precision"] = server["server/precision"] + 2 * server["precision"]
    state = replace(run.state, server=server)
    with pytest.raises(ValueError, match=r"cavity of 1 of 1 clients, .* is no distribution"):
        method.to_pyro(data, data.names[0], state)


def test_phases_and_other_divergences_are_said():
    data = toys.blobs()
    with pytest.warns(UserWarning, match="loss of fedgvi has Renyi's divergence"):
        fedgvi.build(toys.net()).to_pyro(data)
    with pytest.raises(ValueError, match="phase is 1; expected None"):
        pvi.build(toys.net()).to_pyro(data, phase=1)


def test_mean_field_elbo_counts_the_density_of_guides_with_dependences():
    """TraceMeanField_ELBO takes the divergence of a Delta from the prior without its density."""
    data = toys.blobs()
    method = pfedvem.build(toys.net(), guide=guides.full_covariance, init_scale=0.5)
    pair = method.to_pyro(data, data.names[CLIENT], phase=1)
    found = []
    for loss in (Trace_ELBO(), TraceMeanField_ELBO()):
        pyro.set_rng_seed(0)
        found.append(loss.loss(pair.model, pair.guide))
    assert found[0] == pytest.approx(found[1])
