"""Likelihood factors: exact for linear models, and near the exact posterior of others."""

from __future__ import annotations

import math
import warnings

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from checks import close
from pyro import poutine
from scipy.special import gammaln
from torch import Tensor

import pyrofl
from pyrofl import datasets, federations
from pyrofl.data import Federation
from pyrofl.inference import hmc as sampler
from pyrofl.inference.definition.metadata import Moments, metadata_of_class
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.hmc import NUM_CHAINS, hmc, r_hat
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors.factors import (
    MAX_SQUARED,
    Factor,
    integrate,
    without_effects,
)
from pyrofl.models.likelihood_factors.finding import find_structure
from pyrofl.tensors import generator

SIGMA, SIZES = 0.7, (1, 5, 3, 8, 2, 4)
FEW = 1000  # effective draws that the server has at least, of its 4096


def ragged(seed: int = 0) -> Federation:
    """Return six clients with 1 to 8 rows of one covariate and a normal response."""
    rng, parts = np.random.default_rng(seed), {}
    for j, size in enumerate(SIZES):
        x = rng.normal(size=(size, 1))
        y = 0.5 - x[:, 0] + rng.normal(0, 0.8) + SIGMA * rng.normal(size=size)
        parts[f"client {j}"] = (torch.tensor(x), torch.tensor(y))
    return Federation.from_arrays(parts)


def known_sd(x: Tensor) -> Tensor:
    """Return the known standard deviation of a row's response."""
    return SIGMA * (1 + x.square()).sqrt()


def centered(received, local, batch):
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(beta[..., 0], tau))
        with batch.rows():
            mean = a + beta[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, known_sd(batch.x[..., 0])), obs=batch.y)


def non_centered(received, local, batch):
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        a = pyro.deterministic("a", beta[..., 0] + tau * eta)
        with batch.rows():
            mean = a + beta[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, known_sd(batch.x[..., 0])), obs=batch.y)


def exact(data: Federation, clients: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and sd of (beta, tau, a_1 ... a_J) given the rows of some clients.

    Given tau all is normal; tau is integrated over a grid.
    """
    x = torch.cat([data.x[data.train[j]] for j in clients]).double()
    y = torch.cat([data.y[data.train[j]] for j in clients]).double()
    which = torch.cat([torch.full((len(data.train[j]),), j) for j in clients])
    count = data.clients
    fixed_part = torch.cat([torch.ones_like(x), x], 1)
    z = torch.nn.functional.one_hot(which, count).double()
    taus = (torch.arange(4000).double() + 0.5) / 1000
    means, squares, weights = [], [], []
    for tau in taus:
        # Of (beta, e); a = beta_0 + e.
        prior = torch.cat([torch.full((2,), 4.0), tau.square().expand(count)]).double()
        design = torch.cat([fixed_part, z], 1)
        noise = design @ torch.diag(prior) @ design.T + torch.diag(known_sd(x[:, 0]).square())
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(y)).double(), noise)
        weights.append(normal.log_prob(y) - tau.square() / 2)
        gain = torch.diag(prior) @ design.T @ torch.linalg.inv(noise)
        mean, cov = gain @ y, torch.diag(prior) - gain @ design @ torch.diag(prior)
        to_a = torch.eye(2 + count).double()
        to_a[2:, 0] = 1.0
        mean, var = to_a @ mean, (to_a @ cov @ to_a.T).diagonal()
        means.append(torch.cat([mean[:2], tau[None], mean[2:]]))
        squares.append(torch.cat([var[:2], torch.zeros(1), var[2:]]) + means[-1].square())
    w = torch.stack(weights).softmax(0)
    mean = w @ torch.stack(means)
    return mean, (w @ torch.stack(squares) - mean.square()).sqrt()


def found(run: pyrofl.Run, corrected: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and sd of (beta, tau, a_1 ... a_J) of a run's posterior draws."""
    drawn = run.to_arviz(4000, corrected=corrected, progress=False)["posterior"]
    parts = [torch.tensor(drawn[n].values[0]).reshape(4000, -1) for n in ("beta", "tau", "a")]
    values = torch.cat(parts, 1)
    return values.mean(0), values.std(0)


def assert_near(values: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Compare means and sds of draws with exact ones, by four standard errors of FEW draws."""
    shift = (values[0] - expected[0]) / expected[1]
    assert shift.abs().max() < 4 / FEW**0.5, shift
    ratio = values[1] / expected[1]
    assert ratio.log().abs().max() < 4 * 2**0.5 / FEW**0.5, ratio


@pytest.mark.parametrize("program", [centered, non_centered])
def test_a_linear_model_is_exact_after_one_exchange(program):
    data = ragged()
    method = likelihood_factors.hierarchical(program, data, shared="beta tau")
    run = pyrofl.fit(method, data, rounds=1, chunk_size=2, progress=False)
    for j, rows in enumerate(data.train):
        one = torch.ones(len(rows), 1).double()
        v = torch.cat(
            [one, data.x[rows].double(), one], 1
        )  # of beta_0, beta_1 and the client's effect
        scaled = v / known_sd(data.x[rows].double()).square()
        close(run.state.server["server/precision"][j], scaled.T @ v, 1e-8)
        close(run.state.server["server/shift"][j], scaled.T @ data.y[rows].double(), 1e-8)
    expected = exact(data, list(range(6)))
    assert_near(found(run), expected)
    assert_near(found(run, corrected=True), expected)
    drawn = run.to_arviz(200, progress=False)
    assert drawn.attrs["corrected"] == "no: the draws are of the exact posterior"
    stats = run.to_arviz(2000, corrected=True, progress=False)["sample_stats"]
    assert float(stats["pareto_k"][0]) < 0.2
    # What is lost is noise of the clients' own draws.
    assert float(stats["importance_ess"][0]) > 0.9 * 2500


def three_effects(received, local, batch):
    """Have more effects than most clients have rows, so that their directions are arbitrary."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(beta, tau[..., None]).to_event(1))
        x = batch.x[..., 0]
        with batch.rows():
            logits = w[..., 0] + w[..., 1] * x + w[..., 2] * x.square()
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=1.0 * (batch.y > 0))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains, where their draws do not matter."""
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 4,
        "DRAWS_PER_CHAIN": 4,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("program", [centered, three_effects])
def test_chunks_change_nothing(program):
    data = ragged().to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(program, data, shared="beta tau")
    (a,) = federate(method, data, 1, chunk_size=2)
    (b,) = federate(method, data, 1, chunk_size=6)
    for name in ("server/shift", "server/precision"):
        torch.testing.assert_close(a.server[name], b.server[name], rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("short")
def test_equal_seeds_give_equal_draws():
    data = ragged()
    method = likelihood_factors.hierarchical(centered, data, shared="beta tau")
    a, b, other = (list(federate(method, data, 2, seed=s))[-1] for s in (0, 0, 1))
    assert all(torch.equal(v, b.server[n]) for n, v in a.server.items())
    assert not torch.equal(a.server["server/draws"], other.server["server/draws"])


def test_a_client_that_has_not_reported_has_no_factor():
    data = ragged()
    method = likelihood_factors.hierarchical(centered, data, shared="beta tau")
    run = pyrofl.fit(method, data, rounds=1, participation=fixed(4), progress=False)
    some = run.state.reporters.ids.tolist()
    silent = sorted(set(range(6)) - set(some))
    assert len(some) == 4
    assert not run.state.server["server/precision"][silent].any()
    assert float(run.state.server["server/missing"]) == 2
    assert any("have not reported" in line for line in run.warnings)
    # The posterior is that of the rows of the others; effects of the silent follow the prior.
    assert_near(found(run), exact(data, some))


def test_the_marginal_likelihood_of_a_count_is_matched_to_second_order():
    """Of one client with Poisson counts, compared with the trapezoid rule and its differences."""

    def counts(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            b = pyro.sample("b", dist.Normal(0.0, tau))
            with batch.rows():
                rate = (mu + b + batch.x[..., 0]).exp()
                pyro.sample("y", dist.Poisson(rate), obs=batch.y)

    x, y = torch.tensor([0.1, -0.4, 0.8]).double(), torch.tensor([0.0, 2.0, 5.0]).double()
    data = Federation.from_arrays({"a": (x[:, None], y), "b": (x[:2, None], y[1:])})
    structure, _ = find_structure(counts, data, "mu tau", 10.0)
    assert structure.reads.tolist() == [0]
    u, tau = torch.tensor([[0.3, math.log(0.7)]] * 2, dtype=torch.float64), 0.7
    precision = torch.full((2, 1, 1), 4.0).double()
    root = torch.zeros(2, 1, 1).double() + tau
    update = Factor(structure, u, precision, root, data.batch(torch.tensor([0, 1]))).update()
    shift, matrix, at = update["shift"][0], update["precision"][0], float(update["mean"][0, 0])

    def log_marginal(mu: float, tau: float) -> float:
        b = np.linspace(-12, 12, 200_001) * tau
        rate = mu + b[:, None] + x.numpy()
        log = (y.numpy() * rate - np.exp(rate) - gammaln(y.numpy() + 1)).sum(1)
        log = log - b**2 / (2 * tau**2) - math.log(tau)
        return float(np.log(np.trapezoid(np.exp(log), b)))

    def log_factor(mu: float, tau: float) -> float:
        one = torch.zeros(1, 1).double() + mu, torch.zeros(1, 1, 1).double() + tau
        factors = {"shift": shift[None], "precision": matrix[None]}
        return float(integrate(*one, torch.ones(1).double(), factors)[0])

    h = 1e-3
    for way in ((h, 0.0), (0.0, h)):  # by mu and by tau
        slopes = [
            (f(at + way[0], tau + way[1]) - f(at - way[0], tau - way[1])) / (2 * h)
            for f in (log_marginal, log_factor)
        ]
        assert slopes[0] == pytest.approx(slopes[1], abs=1e-5)
    curved = [
        (f(at + h, tau) - 2 * f(at, tau) + f(at - h, tau)) / h**2
        for f in (log_marginal, log_factor)
    ]
    assert curved[0] == pytest.approx(curved[1], abs=1e-4)
    # There the product of cavity and likelihood is highest.
    slope = (log_marginal(at + h, tau) - log_marginal(at - h, tau)) / (2 * h)
    assert slope == pytest.approx(4.0 * (at - 0.3), abs=1e-4)


def test_the_sampler_has_the_moments_of_a_heavy_tail():
    """Student's t with 6 degrees of freedom; its variance is 1.5 times the squared scale."""
    scale = torch.tensor([0.1, 10.0]).double()
    t = dist.StudentT(6.0, torch.tensor([1.0, -2.0]).double(), scale)
    start = torch.randn(NUM_CHAINS, 2, generator=generator("start")).double()
    drawn = hmc(lambda u: t.log_prob(u).sum(-1), start, generator("draws"))
    shift = (drawn.u.mean(0) - t.loc) / (1.5**0.5 * scale)
    assert shift.abs().max() < 4 / FEW**0.5
    # The relative error of a variance is that of a kurtosis of 6.
    assert (drawn.u.var(0) / (1.5 * scale**2)).log().abs().max() < 4 * 5**0.5 / FEW**0.5
    assert drawn.r_hat < 1.1
    apart = drawn.u.view(-1, NUM_CHAINS, 2) + 3 * scale * torch.arange(NUM_CHAINS).double()[:, None]
    assert r_hat(apart) > 2


def test_the_error_of_moments_is_that_of_their_draws():
    """Independent draws, and chains that do not move: then there are as many draws as chains."""
    data = ragged()
    method = likelihood_factors.hierarchical(centered, data, shared="beta tau")
    server = method.init(generator("init"), len(SIZES))
    (moments,) = [m for _, m in metadata_of_class(method.metadata.tensors, Moments)]
    draws = server["server/draws"]
    stuck = draws[:NUM_CHAINS].repeat(len(draws) // NUM_CHAINS, 1)
    for u, count in ((draws, len(draws)), (stuck, NUM_CHAINS)):
        found = moments.noise(server | {"server/draws": u})
        # the largest of three; a standard deviation of 256 means has a relative error of 4%
        assert found == pytest.approx(2 * (2 / count) ** 0.5, rel=0.15)
    half = server | {"server/share": torch.tensor(0.5)}
    assert moments.noise(half) == pytest.approx(moments.noise(server) / 2, rel=1e-12)


def test_hospitals_are_accurate_after_two_exchanges_and_a_correction():
    """Rat tumours, 71 clients; moments in examples/posteriors/references/rat_tumours.json."""
    data = federations.split(datasets.load("rat_tumours"), "groups").to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(programs.hospitals, data, shared="mu tau")
    run = pyrofl.fit(method, data, rounds=2, progress=False)
    drawn = run.to_arviz(2000, progress=False)
    assert float(drawn["sample_stats"]["pareto_k"][0]) < 0.5
    for name, mean, sd in (("mu", -1.95, 0.1271), ("tau", 0.6982, 0.1325)):
        values = drawn["posterior"][name].values
        assert abs(values.mean() - mean) / sd < 4 / FEW**0.5


def unknown_noise(received, local, batch):
    """Have slopes and intercepts of each client, and a noise scale that all share."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(beta, sd).to_event(1))
        known = batch.x[..., 0] > -1.0  # other responses are missing
        with batch.rows():
            y = dist.Normal(2.0 + w[..., 0] + w[..., 1] * batch.x[..., 0], sigma)
            pyro.sample("y", y.mask(known), obs=batch.y)


def test_a_linear_model_with_unknown_noise_has_the_likelihood_of_the_pooled_rows():
    """At all draws the server's density is that of the pooled rows, up to a constant."""
    data = ragged(1).to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(unknown_noise, data, shared="beta sd sigma")
    run = pyrofl.fit(method, data, rounds=1, chunk_size=2, progress=False)
    server = run.state.server
    u = server["server/draws"][::40].double()
    expected = []
    for beta, log_sd, log_sigma in zip(u[:, :2], u[:, 2:4], u[:, 4], strict=True):
        sd, sigma = log_sd.exp(), log_sigma.exp()
        # Densities of half-normal scales, with the Jacobians of their logs.
        value = -beta.square().sum() / 8 - sd.square().sum() / 2 - sigma.square() / 2
        value = value + log_sd.sum() + log_sigma
        for rows in data.train:
            x, y = data.x[rows].double(), data.y[rows].double()
            x, y = x[x[:, 0] > -1], y[x[:, 0] > -1]
            z = torch.cat([torch.ones_like(x), x], 1).double()
            noise = z @ torch.diag(sd.square()) @ z.T + sigma.square() * torch.eye(len(y)).double()
            normal = torch.distributions.MultivariateNormal(2.0 + z @ beta, noise)
            value = value + (normal.log_prob(y) if len(y) else 0.0)
        expected.append(value)
    off = server["server/log_density"][::40].double() - torch.stack(expected)
    assert (off - off.mean()).abs().max() < 1e-8
    found = run.to_arviz(200, progress=False)
    assert found.attrs["corrected"] == "no: the draws are of the exact posterior"
    # What the correction finds is the noise of the clients' own draws.
    stats = run.to_arviz(2000, corrected=True, progress=False)["sample_stats"]
    assert float(stats["pareto_k"][0]) < 0.2
    assert float(stats["importance_ess"][0]) > 0.9 * 2500


def test_an_unknown_noise_that_differs_by_row_is_not_linear():
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.rows():
                sd = sigma * (1 + batch.x[..., 0].square())
                pyro.sample("y", dist.Normal(a, sd), obs=batch.y)

    data = ragged()
    method = likelihood_factors.hierarchical(program, data, shared="mu tau sigma")
    assert method.model.linear is None
    assert likelihood_factors.hierarchical(
        unknown_noise, data, shared="beta sd sigma"
    ).model.linear.tolist() == [True, True, False]


def effects_of_rows(received, local, batch):
    """Have an effect of each row, which is as if the noise were larger."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.rows():
            effect = pyro.sample("effect", dist.Normal(0.0, spread))
            pyro.sample("y", dist.Normal(a + effect, SIGMA), obs=batch.y)


@pytest.mark.parametrize("count", [MAX_SQUARED - 1, MAX_SQUARED + 1])
def test_a_factor_of_many_variables_is_that_of_few(count):
    source = generator("many")
    root = torch.randn(3, count, count, generator=source).double()
    shift = torch.randn(3, count, generator=source).double()
    factors = {"shift": shift, "precision": root @ root.mT / count}
    u = torch.randn(5, count, generator=source).double()
    expected = [
        [h @ one - 0.5 * one @ p @ one for h, p in zip(*factors.values(), strict=True)] for one in u
    ]
    found = without_effects(u, torch.ones(5).double(), factors)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-12, atol=1e-12)


def test_effects_of_rows_are_integrated_out():
    """At all draws the server's density is that of the pooled rows, up to a constant."""
    data = ragged(2).to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(effects_of_rows, data, shared="mu tau spread")
    run = pyrofl.fit(method, data, rounds=1, chunk_size=2, progress=False)
    u, expected = run.state.server["server/draws"][::40], []
    for mu, log_tau, log_spread in u:
        tau, spread = log_tau.exp(), log_spread.exp()
        value = -mu.square() / 8 - tau.square() / 2 - spread.square() / 2 + log_tau + log_spread
        for rows in data.train:
            one, eye = torch.ones(len(rows), len(rows)).double(), torch.eye(len(rows)).double()
            noise = tau.square() * one + (spread.square() + SIGMA**2) * eye
            normal = torch.distributions.MultivariateNormal(mu * one[0], noise)
            value = value + normal.log_prob(data.y[rows])
        expected.append(value)
    off = run.state.server["server/log_density"][::40] - torch.stack(expected)
    assert (off - off.mean()).abs().max() < 1e-8
    found = run.to_arviz(1000, corrected=True, progress=False)
    assert float(found["sample_stats"]["pareto_k"][0]) < 0.5
    assert found["posterior"]["mu"].shape == (1, 1000)


@pytest.mark.usefixtures("short")
def test_a_resumed_fit_is_the_same():
    data = ragged()
    method = likelihood_factors.hierarchical(centered, data, shared="beta tau")
    first = pyrofl.fit(method, data, rounds=1, progress=False)
    again = pyrofl.fit(method, data, rounds=2, resume_from=first.state, progress=False)
    whole = pyrofl.fit(method, data, rounds=2, progress=False)
    assert all(torch.equal(v, again.state.server[n]) for n, v in whole.state.server.items())
    # Nothing changes any more, which draws of two rounds would not show.
    assert max(max(v.values()) for v in whole.records[1].moved.values()) < 1e-6


def two_modes(received, local, batch):
    """Have the square of an effect as the mean: its sign is unknown."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(a.square(), 0.5), obs=batch.y)


@pytest.mark.slow
def test_a_posterior_of_several_modes_is_reported():
    rng = np.random.default_rng(0)
    parts = {}
    for j in range(6):
        y = rng.normal(0.3, 1.2) ** 2 + 0.5 * rng.normal(size=4)
        parts[f"client {j}"] = (torch.zeros(4, 1), torch.tensor(y))
    data = Federation.from_arrays(parts).to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(two_modes, data, shared="mu tau")
    run = pyrofl.fit(method, data, rounds=1, progress=False)
    assert any("have several maxima" in warning for warning in run.warnings)


def square(received, local, batch):
    """Have the square of a shared coefficient as the mean: its sign is unknown."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a.square(), 1.0), obs=batch.y)


def heavy_tails(received, local, batch):
    """Have responses with outliers, whose log density is not concave."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 3.0))
        with batch.rows():
            pyro.sample("y", dist.StudentT(3.0, a, 0.5), obs=batch.y)


def of_mean(mean: float) -> Federation:
    """Return six clients with 1 to 8 normal responses."""
    rng = np.random.default_rng(0)
    rows = [torch.tensor(rng.normal(mean, 1.0, size)) for size in SIZES]
    return Federation.from_arrays(
        {f"client {j}": (torch.zeros(len(y), 1), y) for j, y in enumerate(rows)}
    ).to("cpu", torch.float64)


def test_a_second_mode_that_no_draw_has_reached_is_reported():
    """The prior's mean is a saddle between two modes, a = 1.2 and a = -1.2."""
    data = of_mean(1.5)
    method = likelihood_factors.hierarchical(square, data, shared="a")
    some = {"participation": fixed(4), "chunk_size": 2}
    run = pyrofl.fit(method, data, 5, **some, progress=False)
    (warning,) = run.warnings
    assert "have several maxima" in warning
    assert "reference.nuts" in warning
    grid, y = torch.linspace(0.0, 4.0, 4001).double(), data.y.double()
    log_p = -(grid**2) / 2 - (y[:, None] - grid**2).square().sum(0) / 2
    weight = log_p.softmax(0)  # of the positive mode
    mean = float(weight @ grid)
    sd = float((weight @ (grid - mean) ** 2) ** 0.5)
    draws = run.posterior(FEW)["a"][:, 0]
    assert abs(abs(float(draws.mean())) - mean) < 0.25 * sd  # from normal factors
    assert 0.8 < float(draws.std()) / sd < 1.25


@pytest.mark.parametrize("mean", [-20.0, 0.5])
def test_one_mode_is_not_reported_as_several(mean):
    data = of_mean(mean)
    method = likelihood_factors.hierarchical(heavy_tails, data, shared="a")
    assert not pyrofl.fit(method, data, 2, progress=False).warnings


def test_points_where_a_matrix_is_singular_have_no_density():
    """A normal that is cut off where the Cholesky factor of 2 - u does not exist."""

    def log_density(u: Tensor) -> Tensor:
        return torch.linalg.cholesky((2 - u)[..., None]).flatten() * 0 - u.square().sum(-1) / 2

    start = torch.randn(NUM_CHAINS, 1, generator=generator("start")).double().clamp(max=1.0)
    drawn = hmc(log_density, start, generator("draws"))
    assert drawn.u.max() < 2
    # The mean of a normal below 2 is -phi(2) / Phi(2).
    expected = -math.exp(-2) / math.sqrt(2 * math.pi) / 0.97725
    assert abs(float(drawn.u.mean()) - expected) < 4 / FEW**0.5


def shared_slopes(received, local, batch):
    """Have no site of a client's own; the slopes are a normal population with a shared scale."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        zero = batch.x.new_zeros(3)
        beta = pyro.sample("beta", dist.Normal(zero, tau[..., None]).to_event(1))
        with batch.rows():
            x = batch.x[..., 0]
            mean = beta[..., 0] + beta[..., 1] * x + beta[..., 2] * x.square()
            pyro.sample("y", dist.Normal(mean, SIGMA), obs=batch.y)


def test_a_model_without_own_sites_has_a_posterior_by_quadrature():
    """Given tau the slopes are normal; tau is integrated over a grid."""
    data = ragged(3).to("cpu", torch.float64)
    method = likelihood_factors.hierarchical(shared_slopes, data, shared="beta tau")
    assert method.model.scaled_sites == {"beta"}
    run = pyrofl.fit(method, data, rounds=1, chunk_size=2, progress=False)
    rows = torch.cat(list(data.train))
    x, y = data.x[rows, 0], data.y[rows]
    z = torch.stack([torch.ones_like(x), x, x.square()], 1)
    taus = (torch.arange(4000).double() + 0.5) / 1000
    noise = taus.square()[:, None, None] * (z @ z.T) + SIGMA**2 * torch.eye(len(y)).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(y), noise)
    w = (normal.log_prob(y) - taus.square() / 2).softmax(0)
    gain = taus.square()[:, None, None] * torch.linalg.solve(noise, z.expand(4000, -1, -1)).mT
    mean = gain @ y
    var = (taus.square()[:, None, None] * (torch.eye(3).double() - gain @ z)).diagonal(0, 1, 2)
    means = torch.cat([mean, taus[:, None]], 1)
    squares = torch.cat([var, torch.zeros_like(taus)[:, None]], 1) + means.square()
    expected = w @ means, (w @ squares - (w @ means).square()).sqrt()
    drawn = run.to_arviz(4000, progress=False)["posterior"]
    values = torch.tensor(np.c_[drawn["beta"].values[0], drawn["tau"].values[0]])
    assert_near((values.mean(0), values.std(0)), expected)


def folded(received, local, batch):
    with batch.clients():
        a = pyro.sample("a", dist.Normal(1.0, 2.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a.abs(), 1.0), obs=batch.y)


def folded_with_effects(received, local, batch):
    with batch.clients():
        a = pyro.sample("a", dist.Normal(1.0, 2.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 0.5))
        with batch.rows():
            pyro.sample("y", dist.Normal(a.abs() + effect, 1.0), obs=batch.y)


@pytest.mark.parametrize("program", [folded, folded_with_effects])
def test_the_other_sign_of_a_symmetric_posterior_is_reported(program):
    """Nothing is curved at the prior's mean, a = 1; the mode near -3 has exp(-3/4) of the mass."""
    data = of_mean(3.0)
    run = pyrofl.fit(
        likelihood_factors.hierarchical(program, data, shared="a"), data, progress=False
    )
    with pytest.warns(UserWarning, match="where a has the other sign"):
        run.to_arviz(draws=FEW)
    assert run.status.kind == "not converged"
    assert "where a has the other sign" in run.status.why


def sine(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 3.0))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x[..., 0]).sin(), 0.4), obs=batch.y)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_frequency_is_right_or_another_mode_is_reported(seed):
    """Seven rows of the frequency 2.2: the likelihood has many maxima."""
    rng, sites = np.random.default_rng(22), {}
    for name, n in (("A", 2), ("B", 3), ("C", 2)):
        x = rng.uniform(-3, 3, n)
        sites[name] = (x[:, None], np.sin(2.2 * x) + 0.4 * rng.normal(size=n))
    data = Federation.from_arrays(sites)
    run = pyrofl.fit(
        likelihood_factors.hierarchical(sine, data, shared="w"), data, seed=seed, progress=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = run.to_arviz(4000, progress=False)["posterior"]["w"]
    x, y = (torch.cat([torch.tensor(v[i]) for v in sites.values()]) for i in (0, 1))
    grid = torch.linspace(-15, 15, 30001).double()
    log_l = dist.Normal((grid[:, None] * x[:, 0]).sin(), 0.4).log_prob(y).sum(1)
    weight = (log_l - (grid / 3).square() / 2).softmax(0)
    mean = float(weight @ grid)
    sd = float((weight @ (grid - mean).square()).sqrt())
    right = abs(float(drawn.mean()) - mean) < 0.1 * sd and abs(float(drawn.std()) / sd - 1) < 0.1
    assert right or run.status.kind == "not converged", run.status


def test_exchanged_values_of_two_sites_are_a_second_mode():
    """The prior tells the components of a mixture apart a little; the draws have one labeling."""

    def mixture(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(-0.3, 3.0))
            b = pyro.sample("b", dist.Normal(0.3, 3.0))
            with batch.rows():
                each = torch.stack([batch.y - a, batch.y - b]) / 0.3
                pyro.factor("y", (-each.square() / 2).logsumexp(0))

    rng = np.random.default_rng(0)
    means = rng.choice([-2.0, 2.0], 18)
    y = torch.tensor(means + 0.3 * rng.normal(size=18))
    data = Federation.from_arrays(
        {f"c{j}": (torch.zeros(len(part), 1), part) for j, part in enumerate(y.split([2, 9, 7]))}
    )
    method = likelihood_factors.hierarchical(mixture, data, shared="a b")
    run = pyrofl.fit(method, data, progress=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = run.to_arviz(draws=FEW)["posterior"]
    both = 0.01 < float((drawn["a"] < drawn["b"]).mean()) < 0.99
    said = run.status.kind != "converged"
    assert both or said, [str(one.message) for one in caught]


def one_row_of_a_cosine(received, local, batch):
    with batch.clients():
        p = pyro.sample("p", dist.Uniform(-math.pi, math.pi))
        with batch.rows():
            pyro.sample("y", dist.Normal((p + batch.x[..., 0]).cos(), 0.5), obs=batch.y)


def test_a_mode_with_draws_is_not_reported_as_one_without(recwarn):
    """The posterior given y = -1 has modes at both ends of the range of p."""
    data = Federation.from_arrays({"a": (np.zeros((1, 1)), np.array([-1.0]))})
    method = likelihood_factors.hierarchical(one_row_of_a_cosine, data, shared="p")
    run = pyrofl.fit(method, data, progress=False)
    drawn = run.to_arviz(4000, progress=False)["posterior"]["p"].values
    assert 0.4 < (drawn > 0).mean() < 0.6
    assert not [str(w.message) for w in recwarn if "another mode" in str(w.message)]
    assert "another mode" not in run.status.why


@pytest.mark.parametrize(("handler", "deviation"), [("scale", 0.5), ("mask", math.inf)])
def test_a_scale_or_a_mask_of_an_own_site_counts(handler, deviation):
    """N(mu, 1) to the power 4 is normal with sd 0.5; masked, the rows have no information on mu."""
    around = {
        "scale": lambda: poutine.scale(scale=4.0),
        "mask": lambda: poutine.mask(mask=torch.tensor(False)),
    }[handler]

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            with around():
                u = pyro.sample("u", dist.Normal(mu, 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y)

    rng = np.random.default_rng(0)
    data = Federation.from_arrays({n: (np.zeros((3, 1)), rng.normal(1, 1, 3)) for n in "abc"})
    with pytest.raises(
        likelihood_factors.structure.OtherStructure, match=r"a (scale|mask) of its own"
    ):
        likelihood_factors.hierarchical(program, data, shared="mu")
    if handler == "mask":
        return
    run = pyrofl.fit(pyrofl.hierarchical(program, data, shared="mu"), data, progress=False)
    drawn = run.to_arviz(4000, progress=False)["posterior"]["mu"].values
    variance = 1 / (1 / 4 + 3 / (deviation**2 + 1 / 3))
    mean = variance * sum(float(y.mean()) for y in data.y.split(3)) / (deviation**2 + 1 / 3)
    assert abs(drawn.mean() - mean) < 0.1 * variance**0.5
    assert drawn.std() == pytest.approx(variance**0.5, rel=0.1)


def test_one_sign_is_not_reported_as_two():
    data = of_mean(0.1)  # the posterior has both signs
    method = likelihood_factors.hierarchical(heavy_tails, data, shared="a")
    run = pyrofl.fit(method, data, progress=False)
    run.to_arviz(draws=FEW)
    assert run.status.kind == "converged"


KINKS = {
    "abs": torch.abs,
    "relu": torch.relu,
    "clamp": lambda a: a.clamp(max=40.0),
    "far clamp": lambda a: a.clamp(min=-700.0),
    "very far clamp": lambda a: a.clamp(-1e5, 1e5),
}


@pytest.mark.parametrize("kink", KINKS)
def test_a_mean_with_a_kink_is_not_linear(kink):
    """Two points of one side show none."""

    def program(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(1.0, 2.0))
            effect = pyro.sample("effect", dist.Normal(0.0, 0.5))
            with batch.rows():
                pyro.sample("y", dist.Normal(KINKS[kink](a) + effect, 1.0), obs=batch.y)

    method = likelihood_factors.hierarchical(program, of_mean(3.0), shared="a")
    assert method.model.linear is None


SPREADS = {
    "relu": lambda a: 1.0 + 5 * torch.relu(a - 20.0),
    "where": lambda a: torch.where(a > 30.0, 1.0, 3.0),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_standard_deviation_that_differs_far_away_is_not_known(spread):
    def program(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(1.0, 2.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(a, SPREADS[spread](a)), obs=batch.y)

    method = likelihood_factors.hierarchical(program, of_mean(3.0), shared="a")
    assert method.model.linear is None or not bool(method.model.linear.any())


def test_a_piecewise_mean_of_own_effects_is_not_linear():
    def program(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 3.0))
            effect = pyro.sample("effect", dist.Normal(a + 3 * torch.relu(a - 8.0), 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(effect, 1.0), obs=batch.y)

    method = likelihood_factors.hierarchical(program, of_mean(3.0), shared="a")
    assert method.model.linear is None


def only_a_scale(received, local, batch):
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(2.0))
        u = pyro.sample("u", dist.Normal(0.0, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y)


def test_the_scale_of_own_effects_may_be_the_only_shared_site():
    """The posterior of tau, by the marginal likelihoods on a grid."""
    data = of_mean(1.0)
    method = likelihood_factors.hierarchical(only_a_scale, data, shared="tau")
    run = pyrofl.fit(method, data, progress=False)
    draws = run.to_arviz(draws=2000)["posterior"]["tau"].values.ravel()
    tau = torch.linspace(0.001, 12.0, 12_000).double()
    log_p = -(tau**2) / 8
    for rows in data.train:
        y = data.y[rows].double()
        variance = tau**2 + 1 / len(y)
        log_p = log_p - variance.log() / 2 - y.mean() ** 2 / (2 * variance)
    weight = log_p.softmax(0)
    mean = float(weight @ tau)
    sd = float((weight @ (tau - mean) ** 2) ** 0.5)
    assert abs(draws.mean() - mean) < 5 * sd / 2000**0.5
    assert abs(draws.std() / sd - 1) < 0.1


def test_a_likelihood_of_steps_is_fitted_by_pvi():
    def program(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(6 * a.sign(), 1.0), obs=batch.y)

    method = pyrofl.hierarchical(program, of_mean(3.0), shared="a")
    assert method.name == "pvi"
    assert "the log likelihood is piecewise constant" in method.metadata.sites


def test_names_that_the_library_adds_are_refused():
    def program(received, local, batch):
        with batch.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("a_noncentered", dist.Normal(a, 1.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)

    with pytest.raises(
        ValueError, match="'a_noncentered' ends in '_noncentered', which is reserved"
    ):
        pyrofl.hierarchical(program, of_mean(3.0), shared="a")


def test_a_program_without_unknowns_is_refused():
    def program(received, local, batch):
        with batch.clients(), batch.rows():
            pyro.sample("y", dist.Normal(torch.zeros(()), 1.0), obs=batch.y)

    with pytest.raises(ValueError, match="the program has no latent site"):
        pyrofl.hierarchical(program, of_mean(3.0), shared="a")


def test_exact_draws_are_selected_once_each():
    """4,000 draws are of 4,000 places of the list, in which rejected proposals repeat a few."""
    data = of_mean(1.0)
    method = likelihood_factors.hierarchical(only_a_scale, data, shared="tau")
    run = pyrofl.fit(method, data, progress=False)
    listed = run.state.server["server/draws"].exp()[:, 0]
    for draws in (1, 100, 4000, 4096):
        tau = torch.from_numpy(run.to_arviz(draws=draws)["posterior"]["tau"].values.ravel())
        assert len(tau.unique()) >= 0.99 * draws
    torch.testing.assert_close(tau.sort().values, listed.sort().values.to(tau))
    by_client = run.posterior(1000)["tau"]
    assert bool((by_client == by_client[:, :1]).all())
    assert bool((run.posterior(1000, chunk_size=2)["tau"] == by_client).all())


@pytest.mark.parametrize(("clients", "is_heavy"), [(2, True), (8, False)])
def test_heavy_tails_of_exact_draws_are_reported(clients, is_heavy):
    """Of n normal means with a half-Cauchy sd, the posterior has no moment from n on."""

    def program(received, local, batch):
        with batch.clients():
            tau = pyro.sample("tau", dist.HalfCauchy(1.0))
            u = pyro.sample("u", dist.Normal(0.0, tau))
            with batch.rows():
                pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y)

    y = torch.linspace(-2.0, 2.0, clients).double()
    data = Federation.from_arrays({f"client {j}": ([[1.0]], [y[j]]) for j in range(clients)})
    method = likelihood_factors.hierarchical(program, data, shared="tau")
    run = pyrofl.fit(method, data, progress=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.to_arviz(draws=4000)
    texts = [str(one.message) for one in found]
    assert any("of exact draws" in text and "the sd of tau" in text for text in texts) is is_heavy
    assert any("of exact draws" in text for text in run.warnings) is is_heavy
