"""The structure of hierarchical programs: what scales own effects, and what is refused."""

from __future__ import annotations

import programs
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyrofl.data import Federation
from pyrofl.inference.fit import fit
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors.finding import find_structure
from pyrofl.models.likelihood_factors.structure import Structure


def lines(rows: int = 2) -> Federation:
    """Return three clients with 3, 4 and some rows of two covariates."""
    source = torch.Generator().manual_seed(0)
    parts = {}
    for name, size in (("a", 3), ("b", 4), ("c", rows)):
        parts[name] = tuple(torch.randn(size, *p, generator=source) for p in ((2,), ()))
    return Federation.from_arrays(parts)


def structure(program: object, shared: str) -> Structure:
    return find_structure(program, lines(), shared, 10.0)[0]


def correlated(noise):
    """Return a program whose slopes are a correlated normal, stated in one of three ways."""

    def program(received, local, batch):
        with batch.clients():
            beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
            root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
            whole = sd[..., None] * root
            if noise:
                z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
                w = beta + (whole @ z[..., None])[..., 0]
            else:
                w = pyro.sample("w", dist.MultivariateNormal(beta, scale_tril=whole))
            with batch.rows():
                mean = (w * batch.x).sum(-1)
                pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y)

    return program


def test_centered_and_non_centered_programs_have_equal_roots():
    shared = "beta sd root"
    one, other = (structure(correlated(noise), shared) for noise in (False, True))
    assert one.reads.tolist() == other.reads.tolist() == [0, 1]
    u = torch.randn(
        7, 3, one.shared_sites.size, generator=torch.Generator().manual_seed(1)
    ).double()
    eta = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(2)).double()
    batch = lines().to("cpu", torch.float64).batch(torch.arange(3))
    for a, b in zip(one.evaluate(u, eta, batch), other.evaluate(u, eta, batch), strict=True):
        torch.testing.assert_close(a, b)


def test_sites_with_their_own_scales_and_products_of_scales():
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
            line = mu + tau * sd[..., 0] * a + tau * sd[..., 1] * b * batch.x[..., 0]
            with batch.rows():
                pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)

    found = structure(program, "mu sd tau sigma")
    assert found.powers.tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]
    assert found.reads.tolist() == [0, 4]
    assert not found.mixed


def test_a_scale_that_the_likelihood_reads_too_stays_in_the_factor():
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            a = pyro.sample("a", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Normal(a, 1 + tau), obs=batch.y)

    found = structure(program, "mu tau")
    assert found.reads.tolist() == [0, 1]
    assert found.mixed


def gamma_effects(received, local, batch):
    with batch.clients():
        shape = pyro.sample("shape", dist.HalfNormal(1.0))
        rate = pyro.sample("rate", dist.Gamma(shape, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(rate, 1.0), obs=batch.y)


def scaled_by_data(received, local, batch):
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(0.0, tau * (1 + batch.x[..., :1, 0].abs())))
        with batch.rows():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def scaled_by_another(received, local, batch):
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(0.0, tau))
        b = pyro.sample("b", dist.Normal(0.0, a.exp()))
        with batch.rows():
            pyro.sample("y", dist.Normal(b, 1.0), obs=batch.y)


def of_rows(received, local, batch):
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.rows():
            a = pyro.sample("a", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


@pytest.mark.filterwarnings("ignore:each client has its own a")
@pytest.mark.parametrize(
    ("program", "shared", "text"),
    [
        (gamma_effects, "shape", "site 'rate' of each client is a Gamma"),
        (scaled_by_data, "tau", "the scale of a depends on a client's data"),
        (scaled_by_another, "tau", "the scale of a, b depends on another own site"),
        (of_rows, "tau", "site 'a' has a value for every row, and a client has 20 rows"),
    ],
)
def test_other_programs_are_refused_in_a_line(program, shared, text):
    with pytest.raises(ValueError, match=text) as error:
        likelihood_factors.hierarchical(program, lines(20), shared=shared)
    assert str(error.value).endswith("use pvi.hierarchical for this program")
    assert "\n" not in str(error.value)


def test_a_model_without_own_effects_has_the_posterior_of_the_pooled_rows():
    def normal(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(mu, 0.5), obs=batch.y)

    data = lines()
    method = likelihood_factors.hierarchical(normal, data, shared="mu")
    run = fit(method, data, rounds=1, progress=False)
    y = torch.cat([data.y[rows] for rows in data.train]).double()
    precision = 1 / 4 + len(y) / 0.25
    mean, sd = (0.25 + y.sum() / 0.25) / precision, precision**-0.5
    found = run.posterior(4000)["mu"].double()
    assert abs(found.mean() - mean) < 4 * sd / len(found) ** 0.5 * 2  # half are effective
    assert abs(found.std() / sd - 1) < 4 / len(found) ** 0.5


def test_the_printed_method_has_the_sites():
    data = lines()
    method = likelihood_factors.hierarchical(programs.lines, data, shared="beta sd sigma")
    assert "shared by all clients: beta (2), sd (2), sigma; own to each client: w (2)" in str(
        method
    )
