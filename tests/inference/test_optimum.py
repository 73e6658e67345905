"""Verdicts that test the objective: rates that fell too soon, and guides that are too narrow."""

from __future__ import annotations

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.fitted_run.checkpoints import load, save
from pyrofl.inference.posteriors.optimum import optimum
from pyrofl.models import pvi
from pyrofl.tensors import Tensors, generator

X = torch.randn(40, 2, generator=generator(3)).double()
X[:, 1] = 0.8 * X[:, 0] + 0.6 * X[:, 1]  # correlated, so that independent normals are too narrow
Y = X.sum(-1) + torch.randn(40, generator=generator(4))
PARTS = torch.arange(40).split(10)
LINE = Federation(X, Y, PARTS, tuple(p[:0] for p in PARTS))


def line(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        b = pyro.sample("b", dist.Normal(torch.zeros(2).double(), 3.0).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((batch.x * b).sum(-1), 1.0), obs=batch.y)


def schools(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()).double(), 3.0))
        tau = pyro.sample("tau", dist.HalfNormal(torch.ones(()).double()))
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


short = partial(pvi.hierarchical, data=LINE, num_particles=32, steps=10)


def falling(number: int) -> Method:
    """Return PVI whose damping falls so fast that it never gets there."""
    return short(line, shared="b", damping=0.2 * 0.3**number)


def test_a_run_whose_rates_have_fallen_has_not_converged():
    run = pyrofl.fit(falling, LINE, 12, progress=False)
    assert max(v for r in run.records[-5:] for v in r.moved["b"].values()) < 0.01
    assert run.status.kind == "not converged"
    assert "but the gradient of the ELBO still moves the sd of b" in str(run.status)
    other = pyrofl.fit(falling, LINE, 12, progress=False, stop_when="converged")
    assert other.state.number == 12


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_run_at_its_optimum_has_converged_and_says_how_narrow_it_is(covariance, tmp_path):
    method = short(line, shared="b", covariance=covariance, damping=0.5)
    run = pyrofl.fit(method, LINE, 30, progress=False, stop_when="converged")
    assert run.status.kind == "converged"
    exact = torch.linalg.inv(X.T @ X + torch.eye(2) / 9)
    narrow = 1 - float((exact[0, 0] * torch.linalg.inv(exact)[0, 0]) ** -0.5)
    assert narrow > 0.3
    assert ("too narrow" in str(run.status)) == (covariance == "diagonal")
    if covariance == "diagonal":
        share = float(str(run.status).partition("about ")[2].partition("%")[0]) / 100
        assert share == pytest.approx(narrow, abs=0.1)  # 2 standard errors of some 200 draws
    save(run, tmp_path / "run.safetensors")
    assert load(tmp_path / "run.safetensors", method, LINE).status == run.status


def test_the_slope_of_a_hierarchical_fit_falls_to_nothing():
    method = short(schools, shared="mu tau")
    first = pyrofl.fit(method, LINE, 1, progress=False)
    found = optimum(method, LINE, first.state, 0)
    assert found is not None
    assert found.off.startswith(("the mean of ", "the sd of "))
    last = pyrofl.fit(method, LINE, 20, resume_from=first, progress=False)
    found = optimum(method, LINE, last.state, 0)
    assert found is not None
    assert found.off == ""
