"""Two stages: draws of each client alone are enough for the posterior of all."""

from __future__ import annotations

from functools import cache

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import gammaln, logsumexp
from torch import Tensor

import pyrofl
from pyrofl import datasets, federations
from pyrofl.data import Federation
from pyrofl.inference import hmc as sampler
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.models import two_stage
from pyrofl.models.two_stage import TwoStage
from pyrofl.tensors import generator

SIZES = (1, 5, 2, 8, 1)
FEW = 400  # effective draws that the server has at least, of its 1024


@cache
def counts() -> Federation:
    """Return five clients with 1 to 8 counts, with exposures x."""
    rng, parts = np.random.default_rng(1), {}
    for j, size in enumerate(SIZES):
        x = rng.uniform(1, 3, size=(size, 1))
        y = rng.poisson(rng.gamma(2.0, 1.5) * x[:, 0]).astype(float)
        parts[f"client {j}"] = (torch.tensor(x), torch.tensor(y))
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def rates(received, local, batch):
    """Have a rate of each client, from a Gamma distribution with an unknown mean and shape."""
    with batch.clients():
        mean = pyro.sample("mean", dist.LogNormal(1.0, 1.0))
        shape = pyro.sample("shape", dist.LogNormal(0.5, 0.5))
        rate = pyro.sample("rate", dist.Gamma(shape, shape / mean))
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate * batch.x[..., 0]), obs=batch.y)


def log_marginals(u: np.ndarray) -> np.ndarray:
    """Return log p(y_j | mean, shape) [S, J] at logs of the two [S, 2], in closed form."""
    mean, shape = np.exp(u).T
    found = []
    for rows in counts().train:
        y, x = counts().y[rows].numpy(), counts().x[rows, 0].numpy()
        a, b = shape + y.sum(), shape / mean + x.sum()
        value = shape * np.log(shape / mean) - gammaln(shape) + gammaln(a) - a * np.log(b)
        found.append(value + (y * np.log(x) - gammaln(y + 1)).sum())
    return np.stack(found, 1)


def exact(clients: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and sd of (log mean, log shape, log rates of all clients), on a grid."""
    axes = np.meshgrid(np.linspace(-3, 5, 321), np.linspace(-2.5, 3.5, 241), indexing="ij")
    u = np.stack([v.ravel() for v in axes], 1)
    log = -((u[:, 0] - 1) ** 2) / 2 - (u[:, 1] - 0.5) ** 2 / 0.5
    log += log_marginals(u)[:, clients].sum(1)
    w = np.exp(log - logsumexp(log))
    mean, shape = np.exp(u).T
    first, second = [u[:, 0], u[:, 1]], [u[:, 0] ** 2, u[:, 1] ** 2]
    for j, rows in enumerate(counts().train):
        y, x = (v[rows].numpy() * (j in clients) for v in (counts().y, counts().x[:, 0]))
        a, b = shape + y.sum(), shape / mean + x.sum()
        log_rate = torch.digamma(torch.tensor(a)).numpy() - np.log(b)
        first.append(log_rate)
        second.append(torch.polygamma(1, torch.tensor(a)).numpy() + log_rate**2)
    moments = np.stack(first, 1)
    middle = w @ moments
    return middle, np.sqrt(w @ np.stack(second, 1) - middle**2)


def found(run: pyrofl.Run, corrected: bool | None = None) -> np.ndarray:
    """Return draws [S, 7] of (log mean, log shape, log rates) of a run."""
    drawn = run.to_arviz(1024, corrected=corrected, progress=False)
    reason = "the draws are of the exact posterior" if corrected is None else "corrected=False"
    assert drawn.attrs["corrected"] == f"no: {reason}"
    names = ("mean", "shape", "rate")
    parts = [drawn["posterior"][n].values[0].reshape(1024, -1) for n in names]
    return np.log(np.concatenate(parts, 1))


def assert_near(
    run: pyrofl.Run, draws: np.ndarray, expected: tuple[np.ndarray, np.ndarray]
) -> None:
    """Compare means and sds with exact ones, by four standard errors.

    There are FEW effective draws of the server, and an effective number of each client's.
    """
    (mean, sd), server = expected, run.state.server
    each = float(server["server/noise"]) / float(server["server/known"].sum())
    error = (1 / FEW + each) ** 0.5
    assert np.abs((draws.mean(0) - mean) / sd).max() < 4 * error
    # A kurtosis up to 5 gives a relative error of (4 / FEW)^1/2 of variances.
    assert np.abs(np.log(draws.std(0) / sd)).max() < 4 * error


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the chains, where their draws do not matter."""
    for name, value in {"NUM_METRIC_UPDATES": 1, "ITERATIONS_PER_UPDATE": 2, "THINNING": 1}.items():
        monkeypatch.setattr(sampler, name, value)


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_posterior_is_exact_but_for_the_error_of_draws(rounds):
    method = two_stage.hierarchical(rates, counts(), shared="mean shape", draws=512)
    run = pyrofl.fit(method, counts(), rounds, chunk_size=2, progress=False)
    assert not run.warnings
    assert_near(run, found(run), exact(list(range(5))))


def test_means_of_the_clients_draws_are_marginal_likelihoods():
    """At many values of the shared sites, up to a constant of each client, in standard errors."""
    core = two_stage.hierarchical(rates, counts(), shared="mean shape").aggregate.__self__
    assert isinstance(core, TwoStage)
    middle, width = (v.double() for v in core.client_sites.prior())
    u = torch.tensor([1.0, 0.5]) + 0.5 * torch.randn(50, 2, generator=generator(0)).double()
    expected = torch.tensor(log_marginals(u.numpy()))
    for j in range(5):
        one = counts().batch(torch.tensor([j]))
        z, log_p1, r_hat = core._sampled(one, middle, width, generator("a client", j))
        assert float(r_hat) < 1.1
        w = core._terms(u, z[None], log_p1[None])[:, 0].exp()
        error = w.std(1) / w.mean(1) / len(z) ** 0.5
        off = w.mean(1).log() - expected[:, j]
        off = (off - off[0]) / (error.square() + error[0].square()).sqrt().clamp(min=1e-12)
        assert off.abs().max() < 4.5  # of 250 values


@pytest.mark.usefixtures("short")
def test_chunks_change_nothing():
    method = two_stage.hierarchical(rates, counts(), shared="mean shape", draws=32)
    (a,), (b,) = (federate(method, counts(), 1, chunk_size=size) for size in (2, 5))
    for name, value in a.server.items():
        torch.testing.assert_close(value, b.server[name], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("short")
def test_clients_keep_their_draws_while_others_report():
    method = two_stage.hierarchical(rates, counts(), shared="mean shape", draws=32)
    halves = iter([torch.tensor([0, 3]), torch.tensor([1, 2, 4])])
    one, two = federate(method, counts(), 2, participation=lambda *_: next(halves))
    assert float(one.server["server/missing"]) == 3
    assert float(two.server["server/missing"]) == 0
    kept, held = (state.server["server/draws"] for state in (one, two))
    assert torch.equal(kept[[0, 3]], held[[0, 3]])
    assert not torch.equal(kept[[1, 2, 4]], held[[1, 2, 4]])


@pytest.mark.slow
def test_absent_clients_have_the_posterior_of_a_new_client():
    method = two_stage.hierarchical(rates, counts(), shared="mean shape", draws=256)
    run = pyrofl.fit(method, counts(), 1, participation=fixed(3), progress=False)
    assert any("2" in line and "have not reported" in line for line in run.warnings)
    with pytest.warns(UserWarning, match="draws are not corrected"):
        run.to_arviz(10, progress=False)
    assert_near(run, found(run, corrected=False), exact(sorted(run.state.reporters.ids.tolist())))


@pytest.mark.usefixtures("short")
def test_few_draws_are_reported():
    """Eight schools are much alike, so that few draws of a school are near the others'."""
    data = schools()
    method = two_stage.hierarchical(effects, data, shared="mu tau", draws=64)
    run = pyrofl.fit(method, data, 1, progress=False)
    assert any("draws are too few" in line for line in run.warnings)


@pytest.mark.usefixtures("short")
def test_a_second_round_has_less_noise_where_clients_are_similar():
    """Vague priors: draws of a client with little data are far from the others at first."""

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 30.0))
            a = pyro.sample("a", dist.Normal(mu, 0.3))
            with batch.rows():
                logits = a - 2 + 0 * batch.x[..., 0]
                pyro.sample("y", dist.Bernoulli(logits=logits), obs=1.0 * (batch.y > 4))

    method = two_stage.hierarchical(program, counts(), shared="mu", draws=128)
    one, two = federate(method, counts(), 2)
    first, second = (float(state.server["server/noise"]) for state in (one, two))
    assert first > 0.3
    assert second < first / 3


@pytest.mark.usefixtures("short")
def test_importance_weights_are_refused():
    method = two_stage.hierarchical(rates, counts(), shared="mean shape", draws=32)
    run = pyrofl.fit(method, counts(), 1, progress=False)
    with pytest.raises(ValueError, match="which have no density"):
        run.to_arviz(100, corrected=True, progress=False)


def schools() -> Federation:
    return federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)


def effects(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


def of_schools() -> tuple[Tensor, Tensor]:
    """Return mean and sd of (mu, log tau, theta), by a grid over tau."""
    data = schools()
    y, s2 = data.y.double(), data.x[:, 0].double().square()
    log_tau = torch.linspace(-8, 5, 4001).double()
    tau2 = (2 * log_tau).exp()[:, None]
    v = s2 + tau2
    precision = 1 / 25 + (1 / v).sum(1)
    mu = (y / v).sum(1) / precision
    log = log_tau - (tau2[:, 0] / 25).log1p() - 0.5 * v.log().sum(1) - 0.5 * precision.log()
    w = (log - 0.5 * (y.square() / v).sum(1) + 0.5 * mu.square() * precision).softmax(0)
    part = tau2 / v
    theta = part * y + (1 - part) * mu[:, None]
    variance = part * s2 + (1 - part).square() / precision[:, None]
    first = torch.cat([mu[:, None], log_tau[:, None], theta], 1)
    own = torch.cat([1 / precision[:, None], torch.zeros(4001, 1), variance], 1)
    mean = w @ first
    return mean, (w @ (own + first.square()) - mean.square()).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_eight_schools(rounds):
    data = schools()
    method = two_stage.hierarchical(effects, data, shared="mu tau")
    run = pyrofl.fit(method, data, rounds, progress=False)
    drawn = run.to_arviz(1024, progress=False)["posterior"]
    parts = [drawn["mu"].values[0], np.log(drawn["tau"].values[0]), drawn["theta"].values[0]]
    draws = np.concatenate([v.reshape(1024, -1) for v in parts], 1)
    mean, sd = (v.numpy() for v in of_schools())
    assert_near(run, draws, (mean, sd))


def shared_noise(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def of_data(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        a = pyro.sample("a", dist.Normal(mu * batch.x[..., :1, 0], 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def of_rows(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.rows():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def no_own(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu, 1.0), obs=batch.y)


@pytest.mark.filterwarnings("ignore:each client has its own a")
@pytest.mark.parametrize(
    ("program", "shared", "text"),
    [
        (shared_noise, "mu sigma", "the rows depend on shared sites"),
        (programs.eight_schools, "mu tau", "write own sites in centered form"),
        (of_data, "mu", "the prior of a depends on a client's data"),
        (of_rows, "mu", "site 'a' has a value for every row"),
        (no_own, "mu", "all sites are shared"),
    ],
)
def test_other_programs_are_refused_in_a_line(program, shared, text):
    with pytest.raises(ValueError, match=text) as error:
        two_stage.hierarchical(program, counts(), shared=shared)
    assert "\n" not in str(error.value)
