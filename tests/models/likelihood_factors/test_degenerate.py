"""Chains that do not move, cavities that are nearly singular, and clients without a likelihood."""

import math

import programs
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyrofl import Federation, datasets, federations
from pyrofl.inference import hmc as sampler
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.fit import fit
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors.factors import log_product, without_effects
from pyrofl.models.likelihood_factors.leaving import MIN_RELATIVE_VARIANCE, inverse, positive
from pyrofl.returned import ClientError


@pytest.mark.slow
def test_chains_that_do_not_move_are_no_posterior(monkeypatch):
    data = federations.split(datasets.load("eight_schools"), "groups", 8)
    method = likelihood_factors.hierarchical(programs.eight_schools, data, shared="mu tau")

    def stuck(log_density, start, source):
        found = sampler.hmc(log_density, start, source)
        return found._replace(u=found.u[:1].expand_as(found.u))

    monkeypatch.setattr("pyrofl.models.likelihood_factors.method.hmc", stuck)
    run = fit(method, data, rounds=2, progress=False)
    assert run.status.kind == "diverged"
    assert "the server's chains have not moved" in str(run.status)


def heavy(received, local, batch):
    """Schools with a response that is not normal."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfNormal(5.0))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.StudentT(5.0, theta, 10.0), obs=batch.y)


def test_draws_of_infinite_scales_are_no_posterior(monkeypatch):
    data = federations.split(datasets.load("eight_schools"), "groups", 8)
    method = likelihood_factors.hierarchical(heavy, data, shared="mu tau")

    def far(log_density, start, source):
        found = sampler.hmc(log_density, start, source)
        return found._replace(u=1e4 * found.u)

    monkeypatch.setattr("pyrofl.models.likelihood_factors.method.hmc", far)
    run = fit(method, data, rounds=1, progress=False)
    assert run.status.kind == "diverged"
    assert "is not a distribution; use pvi.hierarchical" in str(run.status)


def test_chains_that_never_moved_in_the_warm_up_restart_from_others():
    u = torch.arange(8.0).reshape(4, 2)
    now = sampler._Point(u, torch.arange(4.0), -u)
    moving = u + 1.0
    moving[1] = u[1]
    found = sampler._restarted(now, [moving, u], torch.Generator().manual_seed(0))
    assert torch.equal(found.u[[0, 2, 3]], u[[0, 2, 3]])
    (at,) = [k for k in (0, 2, 3) if torch.equal(found.u[1], u[k])]
    assert torch.equal(found.value[1], now.value[at])
    assert torch.equal(found.slope[1], now.slope[at])
    assert sampler._restarted(now, [u, u], torch.Generator()) is now


def test_a_cavity_of_few_effective_draws_has_a_covariance(monkeypatch):
    monkeypatch.setattr(sampler, "DRAWS_PER_CHAIN", 4)
    data = federations.split(datasets.load("eight_schools"), "groups", 8)

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 5.0).to_event(1))
            theta = pyro.sample("theta", dist.Normal(mu[..., 0], 3.0))
            with batch.rows():
                pyro.sample("y", dist.StudentT(5.0, theta + mu[..., 1], 10.0), obs=batch.y)

    method = likelihood_factors.hierarchical(model, data, shared="mu")
    run = fit(method, data, rounds=1, progress=False)
    server = dict(run.state.server)
    server["server/precision"] = 1e6 * server["server/precision"]  # then one draw has all weight
    sent = method.download(server, data.cohort(torch.arange(8)))
    assert bool((torch.linalg.eigvalsh(sent["cavity"]) > 0).all())
    sd = torch.linalg.inv(sent["cavity"]).diagonal(dim1=-2, dim2=-1).sqrt()
    assert bool((sd > 0.1 * server["sd"]).all())


def dependent(count):
    """Return a covariance of draws that depend on one variable, but for rounding."""
    source = torch.Generator().manual_seed(0)
    u = torch.randn(4096, 1, generator=source) @ torch.randn(1, count, generator=source)
    return (
        torch.cov((u.double() / u.double().std(0)).T)
        + MIN_RELATIVE_VARIANCE * torch.eye(count).double()
    )


def test_inverses_of_nearly_dependent_variables_are_positive_definite():
    good, bad = torch.eye(33).double() + 0.5, dependent(33)
    assert torch.linalg.cholesky_ex(torch.linalg.inv(bad)).info
    found = inverse(torch.stack([good, bad]))
    assert not torch.linalg.cholesky_ex(found).info.any()
    assert torch.equal(found[0], torch.linalg.inv(good))
    error = found[1] @ bad - torch.eye(33).double()
    assert float(error.abs().max()) < 1e-4


def test_covariances_that_are_not_positive_definite_become_so():
    good, bad = (
        torch.eye(5).double() + 0.5,
        dependent(5) - 2 * MIN_RELATIVE_VARIANCE * torch.eye(5).double(),
    )
    assert torch.linalg.cholesky_ex(bad).info
    found = positive(torch.stack([good, bad]))
    assert torch.equal(found[0], good)
    assert not torch.linalg.cholesky_ex(found).info.any()
    assert float((found[1] - bad).abs().max()) < 5 * MIN_RELATIVE_VARIANCE


FULL = torch.arange(40).double() % 3 != 0
FULL[20:30] = True


def counted(kind):
    """Return a program of binary rows that has no likelihood, or no slope, if all rows are 1."""

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            e = pyro.sample("e", dist.Normal(mu, 0.5))
            full = ((batch.y * batch.mask).sum(-1, keepdim=True) > 9).double()
            if kind == "singular":
                root = torch.linalg.cholesky((1 - 2 * full)[..., None, None])[..., 0, 0]
            else:  # the branch that is not taken has a slope that is NaN
                root = torch.where(
                    e < 1e9, torch.ones_like(e), (e.square() * (1 - 2 * full)).sqrt()
                )
            with batch.rows():
                pyro.sample("y", dist.Bernoulli(logits=e * root), obs=batch.y)

    return program


@pytest.mark.parametrize("kind", ["singular", "no slope"])
def test_a_client_without_a_likelihood_is_refused_by_name(kind):
    rows = list(torch.arange(40).split(10))
    x, none = torch.zeros(40, 1).double(), [r[:0] for r in rows]
    data = Federation(x, FULL.double(), rows, none, names=["a", "b", "c", "d"])
    method = likelihood_factors.hierarchical(counted(kind), data, shared="mu")
    with pytest.raises(ClientError, match="c: the likelihood of a client is 0, not finite or"):
        fit(method, data, rounds=1, progress=False)


def test_factors_whose_product_is_improper_are_refused():
    data = federations.split(datasets.load("eight_schools"), "groups", 8)
    method = likelihood_factors.hierarchical(counted("singular"), data, shared="mu")
    server = method.init(torch.Generator().manual_seed(0), 8)
    n = server["server/shift"].shape[1]
    message = {
        "shift": torch.zeros(8, n).double(),
        "precision": -torch.eye(n).double().repeat(8, 1, 1),
        "multimodal": torch.zeros(8).double(),
    }
    cohort = data.cohort(torch.arange(8))
    with pytest.raises(AggregationError, match=r"is not a distribution; use pvi\.hierarchical"):
        method.aggregate(server, message, cohort, torch.Generator())


def test_draws_whose_density_has_lost_all_digits_are_excluded():
    """Where s is tiny, y^2 / s^2 cancels against the effects' part, up to rounding errors."""
    y = torch.randn(20, generator=torch.Generator().manual_seed(0)).double() * 2
    factors = {
        "shift": y[:, None].expand(-1, 2),
        "precision": torch.ones(20, 2, 2).double(),
        "square": y.square(),
        "count": torch.ones(20).double(),
    }
    s, tau = torch.tensor([[1.0, 0.5], [1e-3, 2.0], [1e-10, 1e6]]).double().T
    u = torch.zeros(3, 1).double()
    found = log_product(u, tau[:, None, None], s**-2, factors)
    scale = (s.square() + tau.square()).sqrt()
    exact = dist.Normal(0.0, scale).log_prob(y[:, None]).sum(0) + 10 * math.log(2 * math.pi)
    assert torch.allclose(found[:2], exact[:2], rtol=1e-6)
    assert found[2] == -torch.inf


@pytest.mark.parametrize("slope", [1e6, 1e15, 1e40, 1e80, 1e200])
@pytest.mark.parametrize("correlation", [0.5, 1 - 1e-14, 1.0])
def test_huge_effects_that_are_collinear_have_no_density_above_the_highest(slope, correlation):
    rest = math.sqrt((1 - correlation) * (1 + correlation))
    root = torch.tensor([[90.0, 0.0], [slope * correlation, slope * rest]]).double()[None]
    x = torch.stack([torch.ones(7), torch.linspace(-2, 3, 7)], 1).double()
    design = torch.cat([x[:, 1:], x], 1)  # one shared slope, and both effects
    factors = {"precision": design.mT @ design, "shift": design.mT @ (x[:, 1] ** 2 + x[:, 0])}
    factors = {name: part[None] for name, part in factors.items()}
    u = torch.tensor([[3.0]]).double()
    residual = x[:, 1] ** 2 + x[:, 0] - 3.0 * x[:, 1]
    best = torch.linalg.lstsq(x, residual[:, None]).solution  # log det A is not negative
    highest = 0.5 * (residual @ x @ best)[0] + float(without_effects(u, torch.ones(1), factors))
    assert float(log_product(u, root, torch.ones(1).double(), factors)) <= float(highest) + 1e-6


def test_draws_are_not_where_a_density_is_infinite():
    def log_density(u):
        return torch.where(u[:, 0] > 1.0, torch.inf, -0.5 * u.square().sum(-1))

    draws = sampler.hmc(log_density, torch.zeros(64, 2).double(), torch.Generator())
    assert float(draws.u[:, 0].max()) <= 1.0
    assert draws.log_density.isfinite().all()
