"""Clients that each have a single category of the response, so that one alone bounds a parameter.

Given the other clients the posterior is then far wider than the whole one.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import pyrofl
from pyrofl import federations
from pyrofl.models.likelihood_factors.leaving import normal_cavity

pytest.importorskip("formulae")


def rows(family: str) -> pd.DataFrame:
    """Return 90 rows of a response with two or three categories."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=90)
    latent = 0.8 * x + rng.logistic(size=90)
    return pd.DataFrame({"x": x, "y": np.digitize(latent, {"bernoulli": [0]}.get(family, [-1, 1]))})


def moments(family: str, table: pd.DataFrame, client: pd.Series) -> dict[str, tuple]:
    """Fit the rows of clients; return means and standard deviations."""
    tables = federations.from_frames({f"{k}": v for k, v in table.groupby(client)})
    method = pyrofl.regression("y ~ x", tables, family=family)
    run = pyrofl.fit(method, tables, progress=False)
    assert run.status.kind == "converged"
    assert run.method.name == "likelihood_factors"
    posterior = run.to_arviz(4000, progress=False)["posterior"]
    return {n: (v.values.mean((0, 1)), v.values.std((0, 1))) for n, v in posterior.items()}


@pytest.mark.parametrize("family", ["bernoulli", "cumulative"])
def test_the_posterior_is_that_of_clients_with_all_categories(family):
    table = rows(family)
    found = moments(family, table, table["y"])
    for name, (mean, sd) in moments(family, table, table.index % 3).items():
        assert np.abs((found[name][0] - mean) / sd).max() < 0.1, name
        assert np.abs(np.log(found[name][1] / sd)).max() < 0.1, name


def test_a_normal_distribution_is_divided_by_a_factor_exactly():
    source = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, generator=source, dtype=torch.float64)
    noise = torch.randn(4000, 3, generator=source, dtype=torch.float64)
    u = 2.0 + noise @ root.mT * torch.tensor([1.0, 10.0, 0.1]).double()
    reads = torch.tensor([0, 2])
    covariance = torch.cov(u.mT, correction=0)
    part = torch.linalg.inv(covariance[reads[:, None], reads])
    precision = torch.stack([0.9 * part, 1.1 * part, torch.zeros_like(part)])
    shift = torch.tensor([[0.3, -20.0]]).double().expand(3, 2)
    found = normal_cavity(u, reads, shift, precision)
    assert found.valid.tolist() == [True, False, True]
    assert torch.allclose(found.precision, part - precision, rtol=1e-6)
    whole = torch.linalg.inv(covariance)
    for j in (0, 2):
        full = torch.zeros(3, 3).double().index_put((reads[:, None], reads), precision[j])
        of_all = whole @ u.mean(0) - torch.zeros(3).double().index_put((reads,), shift[j])
        assert torch.allclose(found.mean[j], torch.linalg.solve(whole - full, of_all), rtol=1e-5)
