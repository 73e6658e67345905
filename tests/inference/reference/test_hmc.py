"""Hamiltonian Monte Carlo with many chains: closed forms, funnels, modes and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pooled_programs import assert_exact, federation, hierarchy, outside

from pyrofl import reference
from pyrofl.inference import hmc
from pyrofl.inference.reference import samplers
from pyrofl.inference.reference.density import JointDensity
from pyrofl.inference.reference.joint import isolated_sampling, joint_model


@pytest.mark.parametrize("model", [hierarchy, pytest.param(outside, marks=pytest.mark.slow)])
def test_hmc_finds_the_posterior_in_closed_form(model):
    data = federation()
    found = reference.hmc(model, data, 40, 32, shared="mu")
    posterior = found["posterior"]
    assert posterior["mu"].shape == (32, 40)
    assert posterior["theta"].dims == ("chain", "draw", "client")
    assert found["sample_stats"]["diverging"].values.shape == (32, 40)
    assert not found["sample_stats"]["diverging"].values.any()
    assert found.attrs["r_hat"] < 1.05
    assert found.attrs["ess"] > 400
    assert_exact(found, data, effective=400)
    if model is hierarchy:
        gap = posterior["theta"] - posterior["mu"]
        np.testing.assert_allclose(posterior["gap"].values, gap.values, atol=1e-12)


@pytest.fixture
def short(monkeypatch):
    """Shorten the warm-up, where the draws do not matter."""
    monkeypatch.setattr(hmc, "ITERATIONS_PER_UPDATE", 4)
    monkeypatch.setattr(hmc, "APPROACH_ITERATIONS", 10)
    monkeypatch.setattr(samplers, "ASCENT_STEPS", 10)


def unreliable(*args):
    """Return few draws, of which the sampler warns."""
    with pytest.warns(UserWarning, match="the draws are unreliable: R-hat is"):
        return reference.hmc(*args, shared="mu")


@pytest.mark.usefixtures("short")
def test_a_seed_fixes_the_draws_of_hmc():
    data = federation()
    first, again = (unreliable(hierarchy, data, 4, 4, 1) for _ in range(2))
    assert first["posterior"].equals(again["posterior"])


def funnel(received, local, batch):
    """Give own values a scale on which the rows have no information (Neal, 2003)."""
    with batch.clients():
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        theta = pyro.sample("theta", dist.Normal(0.0, (v / 2).exp()))
        with batch.rows():
            pyro.sample("y", dist.Normal(0.0 * theta, 1.0), obs=batch.y)


@pytest.mark.slow
def test_hmc_reaches_the_neck_and_the_mouth_of_a_funnel():
    """The scale has its prior, with a standard deviation of 3."""
    found = reference.hmc(funnel, federation(), shared="v")
    v, ess = found["posterior"]["v"].values, found.attrs["ess"]
    assert abs(v.mean()) < 4 * 3 / ess**0.5
    assert abs(np.log(v.std() / 3)) < 4 / (2 * ess) ** 0.5
    # Both tails, of probability 0.0228, within 4 standard errors.
    for tail in (v < -6, v > 6):
        assert abs(tail.mean() - 0.0228) < 4 * (0.0228 / ess) ** 0.5


def positive(received, local, batch):
    """Have sites of several supports, shared and own."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(batch.x.new_zeros(2), 2.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(batch.x.new_ones(())))
        part = pyro.sample("part", dist.Dirichlet(batch.x.new_ones(3)))
        theta = pyro.sample("theta", dist.Normal(mu, tau[..., None]).to_event(1))
        with batch.rows():
            mean = theta.sum(-1) + part[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.5 + tau), obs=batch.y)


def test_the_density_of_several_points_is_that_of_pyro():
    """In coordinates of any centering, with the Jacobian by automatic differentiation."""
    joint = joint_model(positive, federation(), None, 0, "mu tau")
    with isolated_sampling(joint.data, 0):
        bare = JointDensity.of(joint)
        source = torch.Generator().manual_seed(1)
        w = torch.randn(5, len(bare.power), generator=source, dtype=torch.float64)
        for power in (0.0, 0.3, 1.0):
            density = replace(bare, power=torch.full_like(bare.power, power))
            found = density.evaluate(w)
            torch.testing.assert_close(density.coordinates(found), w)
            for point, value in zip(w, found.log_density, strict=True):

                def values(v, density=density):
                    """Return all sites, of the simplex without its last entry."""
                    sites = density.evaluate(v[None]).values
                    sites["part"] = sites["part"][..., :-1]
                    return torch.cat([site.flatten() for site in sites.values()])

                one = density.evaluate(point[None])
                given = {n: v[0] for n, v in one.values.items()}
                program = pyro.poutine.condition(joint, given)
                expected = pyro.poutine.trace(program).get_trace().log_prob_sum()
                jacobian = torch.autograd.functional.jacobian(values, point)
                expected = expected + torch.linalg.slogdet(jacobian).logabsdet
                torch.testing.assert_close(value, expected)


def test_hmc_says_which_programs_it_cannot_run():
    with pytest.raises(ValueError, match="draws is 3; expected a whole number of at least 4"):
        reference.hmc(hierarchy, federation(), 3, shared="mu")

    def discrete(received, local, batch):
        with batch.clients():
            z = pyro.sample("z", dist.Bernoulli(batch.x.new_full((), 0.5)))
            with batch.rows():
                pyro.sample("y", dist.Normal(z, 1.0), obs=batch.y)

    def stacked(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            both = torch.stack([mu.reshape(len(batch), 1), theta.reshape(len(batch), 1)])
            with batch.rows():
                pyro.sample("y", dist.Normal(both.sum(0), 1.0), obs=batch.y)

    with pytest.raises(ValueError, match=r"site 'z' is discrete; .* use reference.nuts"):
        reference.hmc(discrete, federation(), shared="")
    with pytest.raises(ValueError, match=r"cannot run at several points at once .*reference.nuts"):
        reference.hmc(stacked, federation(), shared="mu")


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_hmc_warns_of_modes_between_which_chains_do_not_move():
    def two(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.StudentT(5.0, 0.0, 10.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(mu.abs() - 9.0, 0.5), obs=batch.y)

    found = unreliable(two, federation(), 4, 16)
    assert found.attrs["r_hat"] > 1.05
