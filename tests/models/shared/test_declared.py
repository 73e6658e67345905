"""Hierarchical programs that are refused before any work, in one line."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl.models import pvi


def clients(values: list[float]) -> pyrofl.Federation:
    """Return three ragged clients whose last rows have the given responses."""
    rng = np.random.default_rng(0)
    rows = {f"c{j}": rng.uniform(0.2, 0.8, 2 + j) for j in range(3)}
    rows["c2"] = np.concatenate([rows["c2"], values])
    return pyrofl.Federation.from_arrays({n: (np.zeros((len(y), 1)), y) for n, y in rows.items()})


def program(response):
    """Return a program with own effects and a response."""

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            effect = pyro.sample("effect", dist.Normal(mu, 0.5))
            with batch.rows():
                pyro.sample("y", response(mu, effect), obs=batch.y)

    return model


def beta(mu, effect):
    return dist.Beta(effect.exp(), 2.0)


def gamma(mu, effect):
    return dist.Gamma(2.0, effect.exp())


def exponential(mu, effect):
    """Its log density is finite outside of the support."""
    return dist.Exponential(effect.exp())


def poisson(mu, effect):
    """The other responses are no counts either, so that the first client is named."""
    return dist.Poisson(effect.exp())


def log_normal(mu, effect):
    return dist.LogNormal(effect, 1.0)


BUILDERS = {"default": pyrofl.hierarchical, "pvi": pvi.hierarchical}


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize(
    ("response", "value"),
    [
        (beta, 0.0),
        (beta, 1.0),
        (beta, 1.5),
        (gamma, 0.0),
        (log_normal, 0.0),
        (exponential, -0.5),
        (poisson, 1.5),
    ],
)
def test_responses_without_a_density_are_named(build, response, value):
    message = rf"c2: site 'y' has the value {value:g}, which has no"
    if response is poisson:
        message = "c0: site 'y' has the value 0.58"
    with pytest.raises(ValueError, match=message):
        BUILDERS[build](program(response), clients([value]), shared="mu")


@pytest.mark.parametrize("response", [beta, gamma, log_normal])
def test_responses_inside_of_the_support_are_taken(response):
    method = pyrofl.hierarchical(program(response), clients([1e-3, 0.999]), shared="mu")
    assert method.shared


def test_a_support_that_depends_on_unknowns_is_not_taken_for_a_wrong_value():
    def uniform(mu, effect):
        return dist.Uniform(0.0, mu.exp() + 0.5 + 0 * effect)

    assert pvi.hierarchical(program(uniform), clients([40.0]), shared="mu").name == "pvi"


@pytest.mark.parametrize(
    "condition", [lambda mu: mu.mean() > 0, lambda mu: (mu > 2.5).any(), lambda mu: mu.max() > 2.5]
)
@pytest.mark.parametrize("build", BUILDERS)
def test_a_branch_on_all_draws_is_refused(build, condition):
    def branch(mu, effect):
        return dist.Normal(effect if condition(mu) else 2 * effect, 1.0)

    with pytest.raises(ValueError, match="the density of site 'y' at one draw depends on other"):
        BUILDERS[build](program(branch), clients([0.5]), shared="mu")


def test_a_prior_centered_at_all_draws_is_refused():
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            effect = pyro.sample("effect", dist.Normal(mu - mu.mean(0, keepdim=True), 0.5))
            with batch.rows():
                pyro.sample("y", dist.Normal(effect, 1.0), obs=batch.y)

    with pytest.raises(ValueError, match="the density of site 'effect' at one draw"):
        pvi.hierarchical(model, clients([0.5]), shared="mu")


def test_equal_responses_have_no_standard_deviation():
    data = pyrofl.Federation.from_arrays(
        {f"c{j}": (np.zeros((j + 1, 1)), np.full(j + 1, 2.5)) for j in range(3)}
    )

    def model(received, local, batch):
        with batch.clients():
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            effect = pyro.sample("effect", dist.Normal(mu, 0.5))
            with batch.rows():
                pyro.sample("y", dist.Normal(effect, sigma), obs=batch.y)

    with pytest.warns(UserWarning, match=r"all responses are 2\.5"):
        pyrofl.hierarchical(model, data, shared="mu sigma")

    def known(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            effect = pyro.sample("effect", dist.Normal(mu, 0.5))
            with batch.rows():
                pyro.sample("y", dist.Normal(effect, 0.3), obs=batch.y)

    pyrofl.hierarchical(known, data, shared="mu")


def test_draws_of_one_run_may_share_constants():
    def shifted(mu, effect):
        return dist.Normal(effect + torch.linspace(0.0, 1.0, 3).sum(), 1.0)

    method = pyrofl.hierarchical(program(shifted), clients([0.5]), shared="mu")
    assert method.name == "likelihood_factors"


def test_boolean_responses_of_a_program_are_refused_with_a_remedy():
    data = pyrofl.Federation.from_arrays(
        {name: (np.ones((2, 1)), np.array([True, False])) for name in "ab"}
    )

    def bernoulli(mu, effect):
        return dist.Bernoulli(logits=effect)

    with pytest.raises(ValueError, match=r"its values are int64.*use obs=batch\.y\.to"):
        pyrofl.hierarchical(program(bernoulli), data, shared="mu")


def test_random_numbers_of_a_program_are_named():
    def noisy(mu, effect):
        return dist.Normal(effect + torch.randn(()), 1.0)

    with pytest.raises(ValueError, match=r"changes from run to run .* by pyro.sample alone"):
        pvi.hierarchical(program(noisy), clients([0.5]), shared="mu")


def test_uniform_priors_have_bounds_that_depend_on_each_other():
    def model(received, local, batch):
        with batch.clients():
            scale = pyro.sample("scale", dist.Uniform(0.1, 3.0))
            mu = pyro.sample("mu", dist.Normal(0.0, scale))
            with batch.rows():
                pyro.sample("y", dist.Normal(mu, scale), obs=batch.y)

    for build in BUILDERS.values():
        assert "mu" in build(model, clients([0.5]), shared="mu scale").shared
