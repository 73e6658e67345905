"""Prior predictive draws, and sensitivity of a posterior to its prior."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation, checks

LOC, SCALE, SPREAD, NOISE = 2.0, 1.5, 0.8, 0.5


def data(value=1.0):
    random = torch.Generator().manual_seed(0)
    return Federation.from_arrays(
        {
            name: (torch.zeros(n, 1), value + torch.randn(n, generator=random))
            for name, n in {"A": 3, "B": 7, "C": 1}.items()
        }
    )


def program(scale):
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(LOC, scale))
            z = pyro.sample("z", dist.Normal(mu, SPREAD))
            with batch.rows():
                pyro.sample("y", dist.Normal(z, NOISE), obs=batch.y)

    return model


def method(scale=SCALE, rows=None):
    return pyrofl.hierarchical(program(scale), rows or data(), shared="mu")


def test_prior_draws_have_the_moments_of_the_program():
    found = checks.prior_predictive(method(), data(), draws=4000)
    prior, rows = found["prior"], found["prior_predictive"]["y"]
    for values, variance in (
        (prior["mu"], SCALE**2),
        (prior["z"][..., 0], SCALE**2 + SPREAD**2),
        (rows[..., 0], SCALE**2 + SPREAD**2 + NOISE**2),
    ):
        assert float(values.mean()) == pytest.approx(LOC, abs=5 * math.sqrt(variance / 4000))
        assert float(values.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / 4000))
    same = np.corrcoef(rows.values[0, :, 4], rows.values[0, :, 5])[0, 1]
    share = (SCALE**2 + SPREAD**2) / (SCALE**2 + SPREAD**2 + NOISE**2)
    assert same == pytest.approx(share, abs=5 / math.sqrt(4000))
    table = checks.predictive_checks(found, "mean")
    assert table["client"].tolist() == ["A", "B", "C"]
    assert table["observed"].tolist() == pytest.approx(
        [float(data().y[r].mean()) for r in data().train]
    )


def test_only_a_strong_prior_changes_the_posterior():
    found = {}
    for scale in (100.0, 0.1):
        run = pyrofl.fit(method(scale), data(), progress=False)
        found[scale] = checks.prior_sensitivity(run).loc["mu"]
    wide, strong = found.values()
    assert wide["prior"] < 0.02
    assert wide["diagnosis"] == "not sensitive to the prior"
    assert strong["prior"] > 0.1
    assert strong["diagnosis"] == "strong prior or weak likelihood"


def test_a_posterior_without_shared_priors_is_refused():
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
            z = pyro.sample("z", dist.Normal(mu, SPREAD))
            with batch.rows():
                pyro.sample("y", dist.Normal(z, NOISE), obs=batch.y)

    flat = pyrofl.hierarchical(model, data(), shared="mu")
    run = pyrofl.fit(flat, data(), progress=False)
    with pytest.raises(ValueError, match="no shared site has a prior"):
        checks.prior_sensitivity(run, 50)
    with pytest.raises(ValueError, match="use a proper prior"):
        checks.prior_predictive(flat, data(), 50)
