"""Columns of the response after "|": standard errors, weights and trials, as brms writes them."""

import math
import warnings

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("formulae")

from regression_posteriors import assert_moments, fitted, moments

import pyrofl
from pyrofl import effects, federations

EFFECTS = [28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]  # eight schools, Rubin 1981
ERRORS = [15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]
PRIORS = {"Intercept": dist.Normal(0.0, 20.0), "sd_study": dist.HalfNormal(10.0)}


def studies():
    """Return the table of each study: one effect, its standard error and variance."""
    rows = zip(EFFECTS, ERRORS, strict=True)
    return {
        f"study {k}": pd.DataFrame({"yi": [y], "sei": [se], "vi": [se**2]})
        for k, (y, se) in enumerate(rows)
    }


def meta_analysis():
    """Return mean and sd of the overall effect, of log tau and of the first effect, on a grid."""
    y, variance = torch.tensor(EFFECTS).double(), torch.tensor(ERRORS).double().square()
    log_tau = torch.linspace(-7, 4.5, 20_000).double()
    tau = log_tau.exp()
    total = variance + tau[:, None].square()
    precision = 1 / 20.0**2 + (1 / total).sum(-1)
    mean = (y / total).sum(-1) / precision
    marginal = -0.5 * (total.log().sum(-1) + (y.square() / total).sum(-1))
    marginal = marginal + 0.5 * (mean.square() * precision - precision.log())
    weight = (marginal + dist.HalfNormal(10.0).log_prob(tau) + log_tau).softmax(0)
    keep = variance[0] / total[:, 0]  # part of the overall effect in the first one
    first = keep * mean + (1 - keep) * y[0]
    spread = keep.square() / precision + (1 - keep) * variance[0]
    values = [(mean, 1 / precision), (log_tau, 0 * log_tau), (first, spread)]
    centers = [float(weight @ m) for m, _ in values]
    seconds = [float(weight @ (v + m.square())) for m, v in values]
    sds = [math.sqrt(s - c**2) for s, c in zip(seconds, centers, strict=True)]
    return torch.tensor(centers), torch.tensor(sds), 1e9


@pytest.fixture(scope="module")
def meta():
    """Return the method, the run and the draws of a meta-analysis."""
    return fitted("yi | se(sei) ~ 1 + (1 | study)", studies(), client="study", priors=PRIORS)


def test_a_meta_analysis_has_the_posterior_of_normal_effects_with_known_errors(meta):
    method, _, draws = meta
    assert "sigma" not in method.priors()
    first = lambda d: d["Intercept"] + d["r_study"][:, 0]  # noqa: E731
    names = ["Intercept", lambda d: d["sd_study"].log(), first]
    assert_moments(draws, meta_analysis(), names)


def test_predictions_of_a_meta_analysis_have_the_standard_error_of_the_new_row(meta):
    _, run, draws = meta
    effect = draws["Intercept"] + draws["r_study"][:, 0]
    for error in (1.0, 40.0):
        predicted = run.predict({"sei": [error]}, "study 0")
        sd = math.sqrt(float(effect.var()) + error**2)
        assert float(predicted.values["sd"]) == pytest.approx(sd, rel=0.1)
        assert float(predicted.mean) == pytest.approx(float(effect.mean()), abs=0.2 * sd)
    with pytest.raises(ValueError, match="new rows have no column 'sei'"):
        run.predict({"x": [1.0]}, "study 0")
    assert ("study", "study 0", "Intercept") in effects.groups(run).index


def test_standard_errors_may_be_an_expression():
    one, other = (
        pyrofl.regression(f"yi | se({text}) ~ 1", federations.from_frames(studies()))
        for text in ("sei", "sqrt(vi)")
    )
    assert torch.equal(one.design.federation().x, other.design.federation().x)


def rows(sizes=(12, 20, 16)):
    random = np.random.default_rng(5)
    tables = {}
    for k, n in enumerate(sizes):
        x, se = random.normal(size=n), random.uniform(0.2, 1.5, n)
        y = 0.5 + 0.4 * x + random.normal(0, np.sqrt(0.5 + se**2))
        copies = random.integers(0, 4, n)
        wins, trials = random.binomial(6, 0.4, n), np.full(n, 6)
        columns = {"x": x, "se": se, "y": y, "copies": copies, "wins": wins, "n": trials}
        tables[f"site {k}"] = pd.DataFrame(columns)
    return tables


def test_sigma_may_be_added_to_known_standard_errors():
    tables = rows()
    user = {"x": dist.Normal(0.0, 2.0), "Intercept": dist.Normal(0.0, 2.0)}
    user |= {"sigma": dist.Exponential(1.0)}
    how = {"priors": user, "center": False}
    _, _, draws = fitted("y | se(se, sigma=TRUE) ~ x", tables, **how)
    whole = pd.concat(tables.values())
    x, se, y = (torch.tensor(whole[name].to_numpy()) for name in ("x", "se", "y"))

    def posterior(w):
        scale = (w[:, 2:].exp().square() + se.square()).sqrt()
        likelihood = dist.Normal(w[:, :1] + w[:, 1:2] * x, scale).log_prob(y).sum(-1)
        prior = dist.Normal(0.0, 2.0).log_prob(w[:, :2]).sum(-1)
        return likelihood + prior + w[:, 2] - w[:, 2].exp()

    names = ["Intercept", "b", lambda d: d["sigma"].log()]
    assert_moments(draws, moments(posterior, 3), names)


def test_weights_count_rows():
    tables = rows()
    user = {"b": dist.Normal(0.0, 2.0), "Intercept": dist.Normal(0.0, 2.0)}
    how = {"priors": {**user, "sigma": dist.Uniform(0.999, 1.001)}, "center": False}
    _, _, draws = fitted("y | weights(copies) ~ x", tables, **how)
    whole = pd.concat(tables.values())
    repeated = pd.DataFrame(
        np.repeat(whole.to_numpy(), whole["copies"], axis=0), columns=whole.columns
    )
    design = np.column_stack([np.ones(len(repeated)), repeated["x"]])
    covariance = np.linalg.inv(np.eye(2) / 4 + design.T @ design)
    mean, sd = covariance @ design.T @ repeated["y"], np.sqrt(np.diag(covariance))
    assert_moments(draws, (torch.tensor(mean), torch.tensor(sd), 1e9), ["Intercept", "b"])


def test_columns_after_the_bar_are_those_of_other_forms():
    data = federations.from_frames(rows())
    for one, other, how in (
        ("wins | trials(n) ~ x", "p(wins, n) ~ x", {"family": "binomial"}),
        ("wins | trials(6) ~ x", "p(wins, 6) ~ x", {"family": "binomial"}),
        ("wins | trials(2 * n - 6) ~ x", "p(wins, n) ~ x", {"family": "binomial"}),
    ):
        a, b = (pyrofl.regression(f, data, **how).design.federation() for f in (one, other))
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.x, b.x)
    a = pyrofl.regression("y | weights(copies) + se(se) ~ x", data)
    b = pyrofl.regression("y | se(se) ~ x", data, weights="copies")
    assert torch.equal(a.design.federation().weights, b.design.federation().weights)
    assert a.design.federation().x.shape[1] == 2


@pytest.mark.parametrize(
    ("formula", "how", "text"),
    [
        ("y | se(sei) ~ x", {}, "unknown column 'sei'; did you mean se"),
        ("y | se(minus) ~ x", {}, "site 0: minus is -1 in row 1; expected standard errors above 0"),
        ("y | weights(minus) ~ x", {}, "expected weights of at least 0"),
        ("y | se(se), ~ x", {}, "after '|'"),
        ("y | sd(se) ~ x", {}, "unknown column after '|': 'sd'"),
        ("y | se(se, 2) ~ x", {}, "unexpected '2', expected se"),
        ("y | se(se) + se(se) ~ x", {}, "se is there twice"),
        ("y | se() ~ x", {}, "expected se\\(standard_error\\)"),
        ("y | se(se) | weights(n) ~ x", {}, "expected one '|'"),
        ("wins | se(se) ~ x", {"family": "poisson"}, "column of se, which family poisson does"),
        ("y | weights(n) ~ x", {"weights": "n"}, "are both given"),
        ("y | trials(n) ~ x", {}, "column of trials, which family gaussian does not read"),
        ({"y": "y | se(se) ~ x", "sigma": "~ x"}, {}, "expected se\\(se, sigma=True\\)"),
    ],
)
def test_mistakes_after_the_bar_are_refused_in_a_line(formula, how, text):
    tables = {name: frame.assign(minus=-1.0) for name, frame in rows().items()}
    data = federations.from_frames(tables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=text) as error:
            pyrofl.regression(formula, data, **how)
    assert "\n" not in str(error.value)
