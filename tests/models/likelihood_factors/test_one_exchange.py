"""Linear mixed models: after one exchange the server has the density of the pooled rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

import pyrofl
from pyrofl import datasets, federations, participation
from pyrofl.data import Federation
from pyrofl.inference import hmc as sampler
from pyrofl.inference.engine.federate import federate
from pyrofl.models import likelihood_factors, pvi
from pyrofl.models.likelihood_factors.method import LikelihoodFactors
from pyrofl.models.shared.gaussians import Normals
from pyrofl.tensors import Tensors

SIZES = (1, 5, 3, 8, 1, 4)
EXACT = 1e-8
TAU, SIGMA = 0.8, 0.6


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains, whose draws these tests do not need."""
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 4,
        "DRAWS_PER_CHAIN": 4,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)


@cache
def ragged() -> Federation:
    """Return clients with 1 to 8 rows of a number and the indicator of a level of a factor.

    The third client has no row of that level, and the fifth has one row.
    """
    rng, parts = np.random.default_rng(3), {}
    for j, size in enumerate(SIZES):
        level = (np.arange(size) % 2 == 0) & (j != 2)
        x = np.stack([rng.normal(size=size), level], 1)
        effect = rng.normal(0, 0.8, 2)
        y = 0.5 + effect[0] + (effect[1] - 1) * x[:, 0] + 0.7 * x[:, 1] + rng.normal(0, 0.6, size)
        parts[f"client {j}"] = (torch.tensor(x), torch.tensor(y))
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def learned(received, local, batch):
    """Have correlated intercepts and slopes, a level of a factor, and unknown variances."""
    x = batch.x
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        tril = sd[..., None] * root
        w = pyro.sample("w", dist.MultivariateNormal(beta[..., :2], scale_tril=tril))
        with batch.rows():
            mean = w[..., 0] + w[..., 1] * x[..., 0] + beta[..., 2] * x[..., 1]
            pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)


def known(received, local, batch):
    """Have an intercept of each client, and variances of the rows that are known."""
    x = batch.x
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(beta[..., 0], tau))
        with batch.rows():
            mean = a + (beta[..., 1:] * x).sum(-1)
            pyro.sample("y", dist.Normal(mean, SIGMA + x[..., 0].abs()), obs=batch.y)


def fixed(received, local, batch):
    """Have an intercept of each client, and known variances only."""
    x = batch.x
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        a = pyro.sample("a", dist.Normal(beta[..., 0], TAU))
        with batch.rows():
            mean = a + (beta[..., 1:] * x).sum(-1)
            pyro.sample("y", dist.Normal(mean, SIGMA), obs=batch.y)


@dataclass(frozen=True)
class Pooled:
    """All rows of a federation in one table, with the design of each client's own effects."""

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray  # [N, J m], columns of a client's own effects

    def log_marginal(self, mean: np.ndarray, root: np.ndarray, noise: np.ndarray) -> float:
        """Return the log density of all responses, by one dense normal distribution."""
        count = self.z.shape[1] // len(root)
        own = self.z @ block_diag(*[root @ root.T] * count) @ self.z.T
        return float(multivariate_normal(mean, own + np.diag(noise**2)).logpdf(self.y))


def pooled(data: Federation, columns: Callable[[np.ndarray], np.ndarray]) -> Pooled:
    """Return a federation's rows in one table; `columns` are those that own effects multiply."""
    x, y = (np.concatenate([v[r].double().numpy() for r in data.train]) for v in (data.x, data.y))
    own = block_diag(*[columns(data.x[r].double().numpy()) for r in data.train])
    return Pooled(x, y, own)


def half_normal(log_scale: np.ndarray) -> float:
    """Return the log density of logs of half-normal scales, up to a constant."""
    return float((log_scale - np.exp(2 * log_scale) / 2).sum())


def density_of_learned(u: np.ndarray) -> float:
    """Return the log density of (beta, log sd, root, log sigma) given the pooled rows."""
    beta, log_sd, log_sigma = u[:3], u[3:5], u[6]
    r = np.tanh(u[5])
    root = np.diag(np.exp(log_sd)) @ np.array([[1, 0], [r, (1 - r * r) ** 0.5]])
    # LKJ(2) has the density (1 - r^2)^(2 - 1) of r, whose slope by u is 1 - r^2.
    prior = -(beta @ beta) / 8 + half_normal(log_sd) + half_normal(u[6:7])
    prior += 2 * np.log(1 - r * r)
    rows = pooled(ragged(), lambda x: np.stack([np.ones(len(x)), x[:, 0]], 1))
    mean = beta[0] + rows.x @ beta[1:]
    return prior + rows.log_marginal(mean, root, np.exp(log_sigma) + np.zeros(len(mean)))


def density_of_known(u: np.ndarray) -> float:
    """Return the log density of (beta, log tau) given the pooled rows."""
    beta, log_tau = u[:3], u[3:]
    rows = pooled(ragged(), lambda x: np.ones((len(x), 1)))
    prior = -(beta @ beta) / 8 + half_normal(log_tau)
    noise = SIGMA + np.abs(rows.x[:, 0])
    return prior + rows.log_marginal(beta[0] + rows.x @ beta[1:], np.exp(log_tau)[:, None], noise)


def density_of_schools(u: np.ndarray) -> float:
    """Return the log density of (mu, log tau) of the eight schools given the pooled rows."""
    rows = pooled(schools(), lambda x: np.ones((len(x), 1)))
    prior = -(u[0] ** 2) / 50 + u[1] - np.log1p(np.exp(2 * u[1]) / 25)
    return prior + rows.log_marginal(u[0] + np.zeros(8), np.exp(u[1:])[:, None], rows.x[:, 0])


@cache
def schools() -> Federation:
    return federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)


CASES = {
    "learned": (learned, "beta sd root sigma", ragged, density_of_learned),
    "known": (known, "beta tau", ragged, density_of_known),
    "eight schools": (programs.eight_schools, "mu tau", schools, density_of_schools),
}


def exchanged(
    method: pyrofl.Method, data: Federation, route: str
) -> tuple[LikelihoodFactors, Tensors]:
    """Return the method's core and the server's state once every client has reported."""
    if route == "two rounds":
        halves = iter(torch.arange(data.clients).split([2, data.clients - 2]))
        *_, state = federate(method, data, 2, participation=lambda *_: next(halves))
    else:
        (state,) = federate(method, data, 1, chunk_size=2 if route == "chunks" else data.clients)
    core = method.aggregate.__self__
    assert isinstance(core, LikelihoodFactors)
    return core, state.server


@pytest.mark.parametrize("route", ["together", "chunks", "two rounds"])
@pytest.mark.parametrize("case", CASES)
def test_the_server_has_the_density_of_the_pooled_rows(case, route):
    program, shared, data, density = CASES[case]
    method = likelihood_factors.hierarchical(program, data(), shared=shared)
    core, server = exchanged(method, data(), route)
    size = core.structure.shared_sites.size
    points = torch.tensor(np.random.default_rng(0).normal(size=(300, size)))
    factors = {n: server[f"server/{n}"] for n in core.parts}
    found = core.log_density(points, factors).numpy()
    expected = np.array([density(u) for u in points.numpy()])
    off = found - expected
    assert np.abs(off - off[0]).max() < EXACT * (1 + np.abs(expected).max())


def test_an_absent_client_is_not_in_the_density():
    method = likelihood_factors.hierarchical(known, ragged(), shared="beta tau")
    (state,) = federate(method, ragged(), 1, participation=lambda *_: torch.arange(5))
    core, server = method.aggregate.__self__, state.server
    points = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).double()
    found = core.log_density(points, {n: server[f"server/{n}"] for n in core.parts}).numpy()
    off = found - np.array([density_of_known(u) for u in points.numpy()])
    assert np.ptp(off) > 0.1


def exact_normal() -> tuple[Tensor, Tensor]:
    """Return mean and covariance of (beta, a_1 ... a_J) of `fixed` given the pooled rows."""
    rows, count = pooled(ragged(), lambda x: np.ones((len(x), 1))), len(SIZES)
    # A vector v = (beta, e) has independent normal components, and a = beta_0 + e.
    design = np.concatenate([np.ones((len(rows.y), 1)), rows.x, rows.z], 1)
    prior = np.diag(np.r_[np.full(3, 1 / 4), np.full(count, TAU**-2)])
    covariance = np.linalg.inv(prior + design.T @ design / SIGMA**2)
    mean = covariance @ design.T @ rows.y / SIGMA**2
    to_a = np.eye(3 + count)
    to_a[3:, 0] = 1
    return torch.tensor(to_a @ mean), torch.tensor(to_a @ covariance @ to_a.T)


@pytest.mark.parametrize("route", ["together", "chunks", "two rounds"])
def test_known_variances_give_the_normal_posterior_of_the_pooled_rows(route):
    """Mean and covariance of coefficients and effects, in closed form from the server's state."""
    method = likelihood_factors.hierarchical(fixed, ragged(), shared="beta")
    core, server = exchanged(method, ragged(), route)
    factors = {n: server[f"server/{n}"] for n in core.parts}

    def log_density(u: Tensor) -> Tensor:
        return core.log_density(u[None], factors)[0]

    zero = torch.zeros(3).double()
    covariance = -torch.linalg.inv(hessian(log_density, zero))
    beta = covariance @ jacobian(log_density, zero)
    # Given beta the effects eta_j = (a_j - beta_0) / TAU are normal, with means linear in beta.
    points = torch.cat([zero[None], torch.eye(3).double()])
    asked = {"server/draws": points, "server/log_density": points[:, 0]}
    sent = core.posterior(server | asked, ragged().cohort(torch.arange(6)))
    at = sent["own_mean"][..., 0]  # [J, 4]
    slope = TAU * (at[:, 1:] - at[:, :1])
    slope[:, 0] += 1
    own = torch.diag((TAU * sent["own_root"][:, 0, 0, 0]).square())
    mean = torch.cat([beta, TAU * at[:, 0] + slope @ beta])
    total = torch.cat([torch.eye(3).double(), slope]) @ covariance
    total = total @ torch.cat([torch.eye(3).double(), slope]).mT
    total[3:, 3:] += own
    exact = exact_normal()
    torch.testing.assert_close(mean, exact[0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(total, exact[1], rtol=EXACT, atol=EXACT)


def test_one_round_of_pvi_is_the_normal_posterior_of_the_pooled_rows():
    """PVI sends the same statistics: its step is exact where all is normal."""
    method = pvi.hierarchical(fixed, ragged(), shared="beta", damping=1.0)
    (state,) = federate(method, ragged(), 1, chunk_size=2)
    mean, covariance = (v[..., :3] for v in exact_normal())
    precision = torch.linalg.inv(covariance[:3])
    found = Normals(3, True).matrix(state.server["precision"])
    torch.testing.assert_close(found, precision, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(state.server["shift"], precision @ mean, rtol=EXACT, atol=EXACT)


def test_exact_factors_are_never_damped_with_partial_participation():
    """Means that turn back, as other clients report, do not shorten the change of exact factors."""
    rng = np.random.default_rng(0)
    rows = {f"c{i:02}": (np.ones((3, 1)), rng.normal((-1) ** i * 6, 1, 3)) for i in range(8)}
    data = Federation.from_arrays(rows)

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
            u = pyro.sample("u", dist.Normal(mu, 2.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(u, 1.0), obs=batch.y)

    method = pyrofl.hierarchical(program, data, shared="mu")
    some = participation.fixed(2)
    run = pyrofl.fit(method, data, rounds=30, participation=some, progress=False)
    server = run.state.server
    assert not server["server/missing"]
    assert server["server/share"] == 1
    variance = 1 / (1 / 100 + len(rows) / (4 + 1 / 3))
    mean = variance * sum(y.mean() for _, y in rows.values()) / (4 + 1 / 3)
    drawn = run.to_arviz(4000, progress=False)["posterior"]["mu"].values
    assert abs(drawn.mean() - mean) < 0.1 * variance**0.5
    assert drawn.std() == pytest.approx(variance**0.5, rel=0.1)
