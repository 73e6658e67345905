"""The prior without runs of the program: equal to it, and no other program is captured."""

import subprocess
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyrofl import Federation
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors.captured import CapturedPrior
from pyrofl.models.likelihood_factors.variables import find_mode


def data():
    rng = torch.Generator().manual_seed(0)
    parts = {
        str(j): (torch.randn(4, 1, generator=rng), torch.rand(4, generator=rng).round())
        for j in range(3)
    }
    return Federation.from_arrays(parts)


def rows(logits, batch):
    with batch.rows():
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def crossed(received, local, batch):
    """Shared effects whose scales are entries of another site, and centered own effects."""
    with batch.clients():
        mu = pyro.sample("mu", dist.StudentT(4.0, 0.0, 2.0))
        sd = pyro.sample("sd", dist.HalfCauchy(torch.ones(3)).to_event(1))
        one = pyro.sample("one", dist.Normal(torch.zeros(4), sd[..., :1]).to_event(1))
        two = pyro.sample("two", dist.Normal(mu, sd[..., 1]))
        a = pyro.sample("a", dist.Normal(two, sd[..., 2]))
        rows(a + one.sum(-1) * batch.x[..., 0], batch)


def nested(received, local, batch):
    """A scale that is itself an effect, and a prior with other constraints."""
    with batch.clients():
        top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
        part = pyro.sample("part", dist.Beta(2.0, 3.0))
        mu = pyro.sample("mu", dist.Normal(part, top))
        b = pyro.sample("b", dist.Normal(mu, top))
        a = pyro.sample("a", dist.Normal(b, top))
        rows(a * batch.x[..., 0], batch)


def correlated(received, local, batch):
    """Non-centered own effects with a correlation matrix."""
    with batch.clients():
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sd = pyro.sample("sd", dist.Exponential(torch.ones(2)).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        e = b + sd * (root @ z[..., None])[..., 0]
        rows(e[..., 0] + e[..., 1] * batch.x[..., 0], batch)


def of_noise(received, local, batch):
    """A linear model, whose noise is a shared site."""
    with batch.clients():
        tau, sigma = (pyro.sample(n, dist.HalfNormal(1.0)) for n in ("tau", "sigma"))
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(a, sigma), obs=batch.y)


def computed(received, local, batch):
    """A scale that is no entry of a site, as it has a limit which no point is near."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(0.0, tau.clamp(max=1e6)))
        a = pyro.sample("a", dist.Normal(b, tau))
        rows(a, batch)


def rate(received, local, batch):
    """A site that depends on another one, and is not normal."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        s = pyro.sample("s", dist.Exponential(tau))
        a = pyro.sample("a", dist.Normal(0.0, s))
        rows(a, batch)


def jumping(received, local, batch):
    """A scale that jumps: it has no gradient, and depends on another site."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.StudentT(4.0, 0.0, torch.where(tau > 1.0, 5.0, 0.5)))
        a = pyro.sample("a", dist.Normal(b, tau))
        rows(a, batch)


def scaled(received, local, batch):
    """A prior that counts more at some values of another site."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with poutine.scale(scale=1.0 + (tau.detach() > 1.0).to(tau)):
            b = pyro.sample("b", dist.StudentT(4.0, 0.0, 1.0))
        a = pyro.sample("a", dist.Normal(b, tau))
        rows(a, batch)


def rounded(received, local, batch):
    """A scale that indexes a constant by the value of another site."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        scales = torch.tensor([0.5, 1.0, 5.0], dtype=tau.dtype)
        b = pyro.sample("b", dist.Laplace(0.0, scales[tau.detach().clamp(max=2).long()]))
        a = pyro.sample("a", dist.Normal(b, tau))
        rows(a, batch)


CASES = [
    (crossed, "mu sd one two", True),
    (nested, "top part mu b", True),
    (correlated, "b sd root", True),
    (of_noise, "tau sigma", True),
    (computed, "tau b", False),
    (rate, "tau s", False),
    (jumping, "tau b", False),
    (rounded, "tau b", False),
    (scaled, "tau b", False),
]


@pytest.mark.parametrize(("program", "shared", "is_captured"), CASES)
def test_the_captured_prior_and_its_gradient_are_those_of_the_program(program, shared, is_captured):
    method = likelihood_factors.hierarchical(program, data(), shared=shared)
    factors = method.phases[0].updates[0].__self__
    prior = CapturedPrior(factors.structure, factors.blank)
    rng = torch.Generator().manual_seed(1)
    for k in range(3):  # the first runs the program, and the second captures it
        u = 3 * torch.randn(20, factors.structure.shared_sites.size, generator=rng).double()
        results = []
        for function in (prior, prior.program):
            at = u.clone().requires_grad_()
            with torch.enable_grad():
                densities = function(at)
                parts = [densities.prior, densities.roots, densities.loc, densities.scale]
                if densities.response is not None:
                    parts.append(densities.response.sd.expand(20, 1, 1))
                total = sum((0.1 * (i + 1)) * v.atan().sum() for i, v in enumerate(parts))
            results.append((parts, torch.autograd.grad(total, at)[0]))
        (parts, slope), (expected, right) = results
        for part, value in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(slope, right, rtol=1e-9, atol=1e-9)
        assert (prior.captures.get(20) is not None) is (is_captured and k > 0)


def banana(u):
    """Rosenbrock's function with a mode at (1, 1, 1), without a density at u_0 < -1.5."""
    off = u[:, 1:] - u[:, :-1].square()
    value = -(100 * off.square() + (1 - u[:, :-1]).square()).sum(-1)
    return torch.where(u[:, 0] < -1.5, -torch.inf, value)


def test_the_first_mode_is_that_of_a_bent_density_with_a_bound():
    mode = find_mode(banana, torch.tensor([-1.2, 1.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(
        mode.detach(), torch.ones(1, 3, dtype=torch.float64), rtol=0, atol=1e-8
    )


def test_the_first_mode_of_a_normal_is_its_mean():
    rng = torch.Generator().manual_seed(2)
    root, mean = (
        torch.randn(30, 30, generator=rng).double(),
        torch.randn(30, generator=rng).double(),
    )
    precision = root @ root.mT + torch.eye(30)
    mode = find_mode(
        lambda u: -0.5 * torch.einsum("si,ij,sj->s", u - mean, precision, u - mean), 0 * mean
    )
    torch.testing.assert_close(mode.detach()[0], mean, rtol=0, atol=1e-8)


@pytest.mark.long  # starts a process
def test_an_import_and_a_fit_do_not_load_torchs_compiler():
    code = """
import sys, torch
from pyrofl.models.likelihood_factors.variables import find_mode
find_mode(lambda u: -u.square().sum(-1), torch.ones(3).double())
raise SystemExit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
