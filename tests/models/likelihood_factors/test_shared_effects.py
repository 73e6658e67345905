"""Variables of the server's sampler: shared effects, standardized given their loc and scale."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl.data import Federation
from pyrofl.models import likelihood_factors
from pyrofl.models.likelihood_factors import variables
from pyrofl.models.likelihood_factors.method import LikelihoodFactors
from pyrofl.tensors import generator

SIZES, NOISE = (3, 9, 5), 0.7


def ragged():
    """Return three clients with 3 to 9 rows of one covariate and a normal response."""
    parts, source = {}, generator("shared effects")
    for j, size in enumerate(SIZES):
        x = torch.rand(size, 1, generator=source, dtype=torch.float64)
        y = 1 + x[:, 0] + NOISE * torch.randn(size, generator=source, dtype=torch.float64)
        parts[f"client {j}"] = (x, y)
    return Federation.from_arrays(parts)


def observe(batch, beta):
    with batch.rows():
        x = batch.x[..., 0]
        mean = beta[..., 0] + beta[..., 1] * x + beta[..., 2] * x.square()
        pyro.sample("y", dist.Normal(mean, NOISE), obs=batch.y)


def one_scale(received, local, batch):
    """Have slopes whose scales are functions of tau, and correlated in the likelihood."""
    with batch.clients():
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        scale = torch.stack([tau, tau.square(), 0.5 * tau], -1)
        beta = pyro.sample("beta", dist.Normal(batch.x.new_zeros(3), scale).to_event(1))
        observe(batch, beta)


def nested(received, local, batch):
    """Have slopes around others; loc and scale of both are other sites."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        s = pyro.sample("s", dist.HalfNormal(0.5))
        alpha = pyro.sample(
            "alpha", dist.Normal(mu[..., None] + batch.x.new_zeros(3), tau[..., None]).to_event(1)
        )
        beta = pyro.sample("beta", dist.Normal(alpha, s[..., None]).to_event(1))
        observe(batch, beta)


def fitted(program, shared):
    """Return the definition of likelihood factors, their variables, and the factors of a fit."""
    data = ragged()
    method = likelihood_factors.hierarchical(program, data, shared=shared)
    run = pyrofl.fit(method, data, rounds=1, progress=False)
    definition = method.init.__self__
    assert isinstance(definition, LikelihoodFactors)
    factors = definition._factors(run.state.server)
    return (
        definition,
        definition._variables(factors, run.state.server["server/draws"].double()),
        factors,
    )


@pytest.mark.parametrize("max_joint", [50, 1])
@pytest.mark.parametrize(
    ("program", "shared"), [(one_scale, "tau beta"), (nested, "mu tau s alpha beta")]
)
def test_the_jacobian_and_the_inverse_of_the_change_of_variables(
    program, shared, max_joint, monkeypatch
):
    monkeypatch.setattr(variables, "MAX_JOINT", max_joint)
    _, change, _ = fitted(program, shared)
    assert change.effects[-1].precision.dim() == (2 if max_joint > 1 else 1)
    w = torch.randn(5, change.structure.shared_sites.size, generator=generator(1)).double()
    u, _, growth = change.shared(w)
    torch.testing.assert_close(change.sampled(u), w)
    for point, expected in zip(w, growth, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda w: change.shared(w[None])[0][0], point)
        torch.testing.assert_close(torch.linalg.slogdet(jacobian).logabsdet, expected)


def test_effects_are_standard_normal_given_their_scale_if_the_factors_are_normal():
    definition, change, factors = fitted(one_scale, "tau beta")
    log_density = definition._sampled(factors, change)
    noise = torch.randn(40, 3, generator=generator(2)).double()
    for log_tau in (-4.0, -1.0, 0.0, 2.0):
        w = torch.cat([torch.full((40, 1), log_tau).double(), noise], 1)
        rest = log_density(w) + 0.5 * noise.square().sum(-1)
        torch.testing.assert_close(rest, rest[:1].expand(40), rtol=0, atol=1e-8)
