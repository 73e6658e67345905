"""Distributions of the families that Pyro lacks, and programs of families, beside scipy."""

import math

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats

pytest.importorskip("formulae")

from promises import others_slow
from regression_posteriors import assert_moments, fitted, moments

import pyrofl
from pyrofl import effects, federations
from pyrofl.models.regression.distributions import SkewNormal, ZeroOneInflatedBeta


def skew_normal(mean, sd, alpha):
    """Return scipy's distribution of the given mean and standard deviation."""
    delta = alpha / np.sqrt(1 + alpha**2)
    scale = sd / np.sqrt(1 - 2 * delta**2 / np.pi)
    return stats.skewnorm(alpha, mean - scale * delta * np.sqrt(2 / np.pi), scale)


def inflated(value, mean, phi, zoi, coi):
    inside = (1 - zoi) * stats.beta(phi * mean, phi * (1 - mean)).pdf(value)
    return np.where(value == 0, zoi * (1 - coi), np.where(value == 1, zoi * coi, inside))


@pytest.mark.parametrize("alpha", [-20.0, -1.5, 0.0, 4.0])
def test_skew_normal_is_that_of_scipy(alpha):
    found = SkewNormal(*(torch.tensor(v).double() for v in (0.7, 1.3, alpha)))
    reference = skew_normal(0.7, 1.3, alpha)
    values = np.linspace(-5, 6, 40)
    assert np.allclose(found.log_prob(torch.tensor(values)), reference.logpdf(values), atol=1e-6)
    assert reference.mean() == pytest.approx(float(found.mean))
    assert reference.std() == pytest.approx(float(found.variance.sqrt()))
    torch.manual_seed(0)
    draws = found.expand((2,)).sample((4000,))
    assert draws.shape == (4000, 2)
    assert stats.kstest(draws[:, 1].numpy(), reference.cdf).pvalue > 1e-3


def test_inflated_beta_is_a_mixture_of_0_and_1_and_beta():
    mean, phi, zoi, coi = 0.6, 4.0, 0.3, 0.25
    found = ZeroOneInflatedBeta(*(torch.tensor(v).double() for v in (mean, phi, zoi, coi)))
    values = np.array([0.0, 0.2, 0.9, 1.0])
    expected = np.log(inflated(values, mean, phi, zoi, coi))
    assert np.allclose(found.log_prob(torch.tensor(values)), expected)
    torch.manual_seed(0)
    draws = found.sample((40_000,))
    for value, p in ((0.0, zoi * (1 - coi)), (1.0, zoi * coi)):
        error = math.sqrt(p * (1 - p) / len(draws))
        assert float((draws == value).double().mean()) == pytest.approx(p, abs=4 * error)
    error = float((found.variance / len(draws)).sqrt())
    assert float(draws.mean()) == pytest.approx(float(found.mean), abs=4 * error)
    assert float(draws.var()) == pytest.approx(float(found.variance), rel=0.03)


def rows(sizes=(30, 45, 40), seed=7):
    """Return the tables of three clients with a response for each family."""
    random = np.random.default_rng(seed)
    tables = {}
    for k, n in enumerate(sizes):
        x = random.normal(size=n)
        p = 1 / (1 + np.exp(-0.2 - 0.5 * x))
        share = random.beta(5 * p, 5 * (1 - p)).clip(1e-6, 1 - 1e-6)
        end = random.uniform(size=n)
        frame = pd.DataFrame({"x": x, "n": random.integers(2, 12, n)})
        frame["wins"] = random.binomial(frame["n"], random.beta(6 * p, 6 * (1 - p)))
        frame["share"] = np.where(end < 0.15, 0.0, np.where(end > 0.9, 1.0, share))
        frame["skewed"] = 0.5 + 0.4 * x + abs(random.normal(0, 0.9, n)) + random.normal(0, 0.4, n)
        frame["count"] = random.poisson(4.0 + np.clip(x, -2, 2))
        tables[f"site {k}"] = frame
    return tables


def density_of(formula, family, values, **how):
    """Return the log density of each row of the program at given values of its sites."""
    tables = federations.from_frames(rows())
    method = pyrofl.regression(formula, tables, family=family, center=False, **how)
    batch = method.prepare(tables).batch(torch.arange(3))
    data = {name: torch.tensor(value).double() for name, value in values.items()}
    nodes = poutine.trace(poutine.condition(method.model, data=data)).get_trace({}, {}, batch).nodes
    *_, site = (s for s in nodes.values() if s["type"] == "sample" and s["is_observed"])
    found = site["fn"].log_prob(batch.y)[batch.mask]
    return found.detach().numpy(), pd.concat(rows().values())


def test_programs_have_the_densities_of_scipy():
    both = {"Intercept": 0.3, "b": [0.4]}
    found, table = density_of("p(wins, n) ~ x", "beta_binomial", {**both, "phi": 5.0})
    p = 1 / (1 + np.exp(-0.3 - 0.4 * table["x"]))
    reference = stats.betabinom(table["n"], 5 * p, 5 * (1 - p))
    assert np.allclose(found, reference.logpmf(table["wins"]))
    values = {**both, "phi": 5.0, "zoi": 0.2, "coi": 0.4}
    found, _ = density_of("share ~ x", "zero_one_inflated_beta", values)
    assert np.allclose(found, np.log(inflated(table["share"].to_numpy(), p, 5.0, 0.2, 0.4)))
    found, _ = density_of("skewed ~ x", "skew_normal", {**both, "sigma": 0.8, "alpha": 3.0})
    mean = 0.3 + 0.4 * table["x"]
    assert np.allclose(found, skew_normal(mean, 0.8, 3.0).logpdf(table["skewed"]))
    quantile = {"skewed": "skewed ~ x", "quantile": 0.9}
    found, _ = density_of(quantile, "asym_laplace", {**both, "sigma": 0.8})
    odds = math.sqrt(0.9 / 0.1)  # scipy's kappa; its scale is the geometric mean of both
    reference = stats.laplace_asymmetric(odds, mean, 0.8 / math.sqrt(0.9 * 0.1))
    assert np.allclose(found, reference.logpdf(table["skewed"]))
    found, _ = density_of("count ~ x", "poisson", {"Intercept": 4.0, "b": [0.5]}, link="identity")
    assert np.allclose(found, stats.poisson(4.0 + 0.5 * table["x"]).logpmf(table["count"]))


CASES = {
    "beta_binomial": ("p(wins, n) ~ x", {}),
    "zero_one_inflated_beta": ("share ~ x", {}),
    "skew_normal": ("skewed ~ x", {}),
    "poisson": ("count ~ x", {"link": "identity"}),
    "asym_laplace": ({"skewed": "skewed ~ x", "quantile": 0.75}, {}),
}


def prior(method, name):
    line = next(one for one in method.priors().splitlines() if one.startswith(f"{name} ~ "))
    return eval(f"dist.{line.split(' ~ ')[1]}")


def log_density(family, table, eta, parameters):
    """Return the log density of all rows at draws [S, 1] of parameters."""
    y = {"beta_binomial": "wins", "zero_one_inflated_beta": "share", "poisson": "count"}
    y = torch.tensor(table[y.get(family, "skewed")].to_numpy(float))
    if family == "beta_binomial":
        n, a, b = torch.tensor(table["n"].to_numpy(float)), eta.sigmoid(), (-eta).sigmoid()
        (phi,) = parameters
        beta = lambda p, q: torch.lgamma(p) + torch.lgamma(q) - torch.lgamma(p + q)  # noqa: E731
        return beta(y + phi * a, n - y + phi * b) - beta(phi * a, phi * b)
    if family == "zero_one_inflated_beta":
        phi, zoi, coi = parameters
        inside = y.clamp(1e-9, 1 - 1e-9)
        log_beta = dist.Beta(phi * eta.sigmoid(), phi * (-eta).sigmoid()).log_prob(inside)
        ends = torch.where(y == 1, coi, 1 - coi).log() + zoi.log()
        return torch.where((y == 0) | (y == 1), ends, log_beta + (1 - zoi).log())
    if family == "poisson":
        return torch.where(eta > 0, y * eta.clamp(min=1e-300).log() - eta, -torch.inf)
    if family == "asym_laplace":
        (sigma,) = parameters
        z = (y - eta) / sigma
        return -sigma.log() - z * (0.75 - (z < 0).to(z))
    sigma, alpha = parameters
    delta = alpha / (1 + alpha**2).sqrt()
    scale = sigma / (1 - 2 * delta**2 / math.pi).sqrt()
    z = (y - eta) / scale + delta * math.sqrt(2 / math.pi)
    return -0.5 * z**2 - scale.log() + torch.special.log_ndtr(alpha * z)


MAPS = {  # from real numbers, with the log of the slope
    "phi": lambda v: (v.exp(), v),
    "sigma": lambda v: (v.exp(), v),
    "alpha": lambda v: (v, 0 * v),
    "zoi": lambda v: (
        v.sigmoid(),
        torch.nn.functional.logsigmoid(v) - torch.nn.functional.softplus(v),
    ),
    "coi": lambda v: (
        v.sigmoid(),
        torch.nn.functional.logsigmoid(v) - torch.nn.functional.softplus(v),
    ),
}
INVERSE = {"phi": torch.log, "sigma": torch.log, "zoi": torch.logit, "coi": torch.logit}


@pytest.mark.parametrize("family", others_slow(CASES, ("poisson", "beta_binomial")))
def test_posteriors_are_those_of_the_pooled_rows(family):
    formula, how = CASES[family]
    method, run, draws = fitted(formula, rows(), family=family, **how)
    table = pd.concat(rows().values())
    x = torch.tensor(table["x"].to_numpy())
    names = [n for n in ("phi", "zoi", "coi", "sigma", "alpha") if n in draws]
    middle = 4.0 if family == "poisson" else 0.0

    def posterior(w):
        eta = middle + w[:, :1] + w[:, 1:2] * (x - x.mean())
        total = prior(method, "Intercept").log_prob(middle + w[:, 0])
        total = total + prior(method, "b[x]").log_prob(w[:, 1])
        parameters = []
        for k, name in enumerate(names, 2):
            value, slope = MAPS[name](w[:, k])
            total = total + prior(method, name).log_prob(value) + slope
            parameters.append(value[:, None])
        return total + log_density(family, table, eta, parameters).sum(-1)

    values = [lambda d: d["Intercept"] + x.mean() * d["b"][:, 0] - middle, "b"]
    values += [lambda d, n=n: INVERSE.get(n, lambda v: v)(d[n]) for n in names]
    assert_moments(draws, moments(posterior, 2 + len(names)), values)
    predicted = run.predict({"x": [0.0]}, None).frame() if family != "beta_binomial" else None
    predicted = (
        run.predict({"x": [0.0], "n": [10]}, None).frame() if predicted is None else predicted
    )
    assert np.isfinite(predicted.select_dtypes("number").to_numpy()).all()


# New cases of pleuropneumonia among cattle by herd, in up to four periods (cbpp of lme4).
HERDS = """
2/14 3/12 4/9 0/5, 3/22 1/18 1/21, 8/22 2/16 0/16 2/20, 2/10 0/10 2/9 0/6, 5/18 0/25 0/24
1/4, 3/17 0/17 0/18 1/20, 8/16 1/10 3/9 0/5, 12/34, 2/9 0/6 0/8 0/6, 1/22 1/22 0/18 2/22,
0/25 5/27 3/22 1/22, 2/10 1/8 0/6 0/5, 1/21 2/24 0/19 0/23, 11/19 0/2 0/3 0/2, 1/19 1/15
1/15 0/15
"""


def herds():
    """Return the table of each herd."""
    tables = {}
    for herd, text in enumerate(HERDS.replace("\n", " ").split(",")):
        pairs = [map(int, one.split("/")) for one in text.split()]
        frame = pd.DataFrame(pairs, columns=["wins", "n"])
        tables[f"herd {herd}"] = frame.assign(period=[f"p{k}" for k in range(len(frame))])
    return tables


def test_likelihoods_that_are_flat_in_a_precision_do_not_pull_it_to_0():
    """Few herds determine phi: at the first draws, their factors are flat and prefer small phi."""
    method, run, draws = fitted("p(wins, n) ~ period", herds(), family="beta_binomial")
    assert run.method.name == "likelihood_factors"
    table = pd.concat(herds().values())
    x = torch.tensor(pd.get_dummies(table["period"]).iloc[:, 1:].to_numpy(float))
    names = ["b[period[p1]]", "b[period[p2]]", "b[period[p3]]"]

    def posterior(w):
        eta, phi = w[:, :1] + w[:, 1:4] @ (x - x.mean(0)).T, w[:, 4:].exp()
        total = prior(method, "Intercept").log_prob(w[:, 0])
        total = total + prior(method, "phi").log_prob(phi[:, 0]) + w[:, 4]
        for k, name in enumerate(names, 1):
            total = total + prior(method, name).log_prob(w[:, k])
        return total + log_density("beta_binomial", table, eta, [phi]).sum(-1)

    values = [lambda d: d["Intercept"] + d["b"] @ x.mean(0)]
    values += [lambda d, k=k: d["b"][:, k] for k in range(3)]
    assert_moments(draws, moments(posterior, 5), [*values, lambda d: d["phi"].log()])


@pytest.mark.parametrize(
    ("formula", "family", "text"),
    [
        ("skewed ~ x", "asym_laplace", "parameter quantile has no value; expected a number"),
        ({"skewed": "skewed ~ x", "quantile": 1.0}, "asym_laplace", "expected numbers between 0"),
        ({"skewed": "skewed ~ x", "quantile": True}, "asym_laplace", "expected '~ x' or a number"),
        ({"skewed": "skewed ~ x", "sigma": 0}, "gaussian", "sigma is 0; expected positive numbers"),
        ({"skewed": "skewed ~ x", "nu": float("nan")}, "student", "expected positive numbers"),
        ("wins ~ x", "beta_binomial", "needs the number of trials"),
        ("p(n, wins) ~ x", "beta_binomial", "from 0 to the number of trials"),
        ("skewed ~ x", "zero_one_inflated_beta", "expected numbers from 0 to 1"),
    ],
)
def test_mistakes_in_families_are_refused_in_a_line(formula, family, text):
    with pytest.raises(ValueError, match=text) as error:
        pyrofl.regression(formula, federations.from_frames(rows()), family=family)
    assert "\n" not in str(error.value)


def test_conditional_effects_of_quantiles_are_quantiles():
    tables = federations.from_frames(rows())
    formula = {"skewed": "skewed ~ x", "quantile": 0.9, "sigma": 0.1}
    method = pyrofl.regression(formula, tables, family="asym_laplace")
    assert "sigma" not in method.priors()
    assert "quantile = x.new_tensor(0.9)" in method.program()
    run = pyrofl.fit(method, tables, progress=False)
    at = effects.conditional(run, "x", at={"x": [0.0]}, points=1)["mean"].item()
    table = pd.concat(rows().values())
    residual = table["skewed"] - 0.4 * table["x"]
    assert at == pytest.approx(np.quantile(residual, 0.9), abs=0.4)
