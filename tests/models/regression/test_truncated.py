"""Truncated responses have the densities, moments and draws of scipy, and their posterior."""

import math
import warnings

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

pytest.importorskip("formulae")

from promises import others_slow
from regression_posteriors import assert_moments, fitted, moments

import pyrofl
from pyrofl import federations
from pyrofl.models.regression.truncated import Truncated

INF = math.inf
COUNTS = [(1, INF), (3, INF), (-INF, 4), (2, 5), (0, 6)]
NUMBERS = [(0.0, INF), (-INF, 0.5), (-0.3, 0.8), (3.0, INF), (4.0, 5.0), (-INF, -4.0)]
DRAWS = 40_000


def bases():
    """Return pairs of a distribution of torch and that of scipy, of two means each."""
    mean, shape = np.array([0.8, 3.0]), 1.7
    rate, size = torch.tensor(mean), torch.tensor(shape, dtype=torch.float64)
    logits = rate.log() - size.log()
    spread = scipy.stats.nbinom(shape, shape / (shape + mean))
    return {
        "poisson": (dist.Poisson(rate), scipy.stats.poisson(mean)),
        "negative binomial": (dist.NegativeBinomial(size, logits=logits), spread),
        "normal": (dist.Normal(rate - 0.5, 0.7), scipy.stats.norm(mean - 0.5, 0.7)),
    }


@pytest.mark.parametrize(
    ("name", "bounds"),
    [(n, b) for n in ("poisson", "negative binomial") for b in COUNTS]
    + [("normal", b) for b in NUMBERS],
)
def test_probabilities_moments_and_draws_are_those_of_scipy(name, bounds):
    base, known = bases()[name]
    low, high = bounds
    law = Truncated(base, low, high)
    if name == "normal":
        grid = np.linspace(max(low, -6.0), min(high, 9.0), 20_001)
        value = known.pdf(grid[:, None])
        mass = known.cdf(high) - known.cdf(low) if low < 2 else known.sf(low) - known.sf(high)
        expected = value / mass
        found = law.log_prob(torch.tensor(grid)[:, None]).exp().numpy()
        assert found == pytest.approx(expected, rel=1e-9)
        total = np.trapezoid(found, grid, axis=0)
        mean = np.trapezoid(found * grid[:, None], grid, axis=0)
        square = np.trapezoid(found * grid[:, None] ** 2, grid, axis=0)
        assert total == pytest.approx(1.0, rel=1e-5)
    else:
        counts = np.arange(max(low, 0), min(high, 300) + 1)[:, None]
        value = known.pmf(counts) / known.pmf(counts).sum(0)
        found = law.log_prob(torch.tensor(counts).double()).exp().numpy()
        assert found == pytest.approx(value, rel=1e-9)
        mean, square = (value * counts).sum(0), (value * counts**2).sum(0)
    variance = square - mean**2
    assert law.mean.numpy() == pytest.approx(mean, rel=1e-5)
    assert law.variance.numpy() == pytest.approx(variance, rel=1e-3)
    torch.manual_seed(0)
    drawn = law.sample((DRAWS,)).numpy()
    assert (drawn >= low).all()
    assert (drawn <= high).all()
    errors = np.sqrt(variance / DRAWS)
    assert (np.abs(drawn.mean(0) - mean) < 4.5 * errors).all()
    assert drawn.var(0) == pytest.approx(variance, rel=0.12)


def test_rare_values_have_finite_densities_and_gradients():
    rate = torch.tensor([-30.0, -3.0, 3.0], dtype=torch.float64, requires_grad=True)
    law = Truncated(dist.Poisson(rate.exp()), 1)
    law.log_prob(torch.ones(3).double()).sum().backward()
    assert torch.isfinite(rate.grad).all()
    assert law.log_prob(torch.ones(3).double()).detach()[0] == pytest.approx(0.0, abs=1e-9)
    loc = torch.tensor([-30.0, 0.0, 30.0], dtype=torch.float64, requires_grad=True)
    for bounds in ((0.0, INF), (-INF, 0.0), (0.0, 1.0)):
        loc.grad = None
        Truncated(dist.Normal(loc, 1.0), *bounds).log_prob(torch.tensor(0.0)).sum().backward()
        assert torch.isfinite(loc.grad).all()


PROBLEMS = {
    "gaussian": ("y | trunc(lb=-0.5) ~ x", (-0.5, INF)),
    "poisson": ("y | trunc(lb=2) ~ x", (2, INF)),
    "negative_binomial": ({"y": "y | trunc(lb=1, ub=8) ~ x", "shape": 2.5}, (1, 8)),
}
PRIORS = {"b": dist.Normal(0.0, 2.0), "Intercept": dist.Normal(0.0, 2.0)}


def tables(family, bounds):
    random, frames = np.random.default_rng(6), {}
    for name, n in (("bern", 120), ("basel", 90), ("chur", 150)):
        x = random.normal(size=9 * n)
        eta = 0.6 + 0.5 * x
        y = {
            "gaussian": random.normal(eta, 0.8),
            "poisson": random.poisson(np.exp(eta)),
            "negative_binomial": random.negative_binomial(2.5, 2.5 / (2.5 + np.exp(eta))),
        }[family]
        inside = (y >= bounds[0]) & (y <= bounds[1])
        frames[name] = pd.DataFrame({"x": x[inside][:n], "y": y[inside][:n]})
    return frames


@pytest.mark.parametrize("family", others_slow(PROBLEMS, ()))
def test_the_posterior_is_that_of_the_pooled_rows(family):
    formula, (low, high) = PROBLEMS[family]
    frames = tables(family, (low, high))
    whole = pd.concat(frames.values())
    x, y = (torch.tensor(whole[name].to_numpy()).double() for name in ("x", "y"))
    counts = torch.arange(low, min(high, 60) + 1).double() if family != "gaussian" else None

    def log_posterior(w):
        eta = w[:, :1] + w[:, 1:2] * x
        prior = dist.Normal(0.0, 2.0).log_prob(w[:, :2]).sum(-1)
        if family == "gaussian":
            law = dist.Normal(eta, w[:, 2:].exp())
            seen = law.log_prob(y) - torch.log1p(-law.cdf(torch.tensor(low).double()))
            return seen.sum(-1) + prior + w[:, 2] - w[:, 2].exp()
        size = torch.tensor(2.5).double()
        base = dist.Poisson if family == "poisson" else None
        law = base(eta.exp()) if base else dist.NegativeBinomial(size, logits=eta - size.log())
        mass = law.log_prob(counts[:, None, None]).logsumexp(0)
        return (law.log_prob(y) - mass).sum(-1) + prior

    how = {"priors": PRIORS, "center": False, "family": family}
    names = ["Intercept", "b"]
    if family == "gaussian":
        how["priors"] = {**PRIORS, "sigma": dist.Exponential(1.0)}
        names.append(lambda d: d["sigma"].log())
    _, run, draws = fitted(formula, frames, **how)
    assert_moments(draws, moments(log_posterior, len(names)), names)
    predicted = run.predict({"x": [-1.0, 0.0]}, "bern", draws=200)
    assert float(predicted.mean.min()) > low
    assert (predicted.values["5%"] >= low).all()


REFUSED = [
    ("y | trunc() ~ x", "gaussian", "expected trunc"),
    ("y | trunc(0) ~ x", "gaussian", "expected trunc"),
    ("y | trunc(lb=x) ~ x", "gaussian", "expected trunc"),
    ("y | trunc(lb=3, ub=1) ~ x", "gaussian", "expected trunc"),
    ("y | trunc(lb=nan) ~ x", "gaussian", "expected trunc"),
    ("y | trunc(lb=0) + trunc(ub=9) ~ x", "gaussian", "expected trunc"),
    ("y | trunc(lb=1.5) ~ x", "gaussian", "bern: response y is 1 in row 1; expected numbers from"),
    ("y | trunc(lb=0.5) ~ x", "poisson", "expected whole numbers for counts, such as lb=1"),
    ("y | trunc(lb=0) ~ x", "poisson", "expected whole numbers for counts, such as lb=1"),
    ("y | trunc(ub=5000) ~ x", "poisson", "at most 1,000 counts below lb or up to ub"),
    ("y | trunc(ub=1) ~ x", "poisson", "response y is 2 in row 2; expected numbers from -inf to 1"),
    ("y | trunc(lb=0) ~ x", "gamma", "has a column of trunc, which family gamma does not read"),
]


@pytest.mark.parametrize(("formula", "family", "text"), REFUSED)
def test_wrong_bounds_are_refused_in_one_line(formula, family, text):
    frame = pd.DataFrame({"x": [0.1, 0.5, -0.2, 0.7], "y": [1, 2, 2, 3]})
    data = federations.from_frames({"bern": frame})
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        pyrofl.regression(formula, data, family=family)
    assert text in str(caught.value)


def test_truncation_may_be_with_other_columns():
    frame = pd.DataFrame({"x": [0.1, 0.5, -0.2, 0.7], "y": [1, 2, 2, 3.0], "e": 0.5, "w": 1.0})
    data = federations.from_frames({"bern": frame})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = pyrofl.regression("y | weights(w) + trunc(lb=0) + se(e) ~ x", data)
    assert "Truncated(dist.Normal(eta, sigma), 0.0, torch.inf)" in method.program()
    assert set(method.design.formula.columns) == {"weights", "se"}
