"""Formulas of parameters: posteriors equal those of hand-written log densities on pooled rows."""

import warnings

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("formulae")

from promises import others_slow
from regression_posteriors import assert_moments, fitted, moments
from torch.nn.functional import softplus

import pyrofl
from pyrofl import effects, federations

SIZES = {"bern": 50, "basel": 80, "chur": 70, "zug": 40}


def frames(seed=3):
    """Return the tables of four clients, with a response for each parameter."""
    random = np.random.default_rng(seed)
    tables = {}
    for name, n in SIZES.items():
        x = random.normal(size=n)
        frame = pd.DataFrame({"x": x})
        frame["y"] = (
            1 + 0.5 * x + random.normal(0, 0.6) + np.exp(-0.3 + 0.5 * x) * random.normal(size=n)
        )
        p, phi = 1 / (1 + np.exp(-0.3 - 0.6 * x)), np.exp(2 + 0.5 * x)
        frame["share"] = random.beta(phi * p, phi * (1 - p)).clip(1e-6, 1 - 1e-6)
        mean, shape = np.exp(1.0 + 0.4 * x), np.exp(0.5 + 0.6 * x)
        frame["count"] = random.negative_binomial(shape, shape / (shape + mean))
        zero = random.uniform(size=n) < 1 / (1 + np.exp(0.5 - 0.8 * x))
        frame["inflated"] = np.where(zero, 0, random.poisson(mean))
        time = random.weibull(np.exp(0.3 + 0.3 * x)) * np.exp(-0.4 * x)
        limit = random.uniform(0.3, 2.5, n)
        frame["seen"] = (time <= limit).astype(int)
        frame["time"] = np.minimum(time, limit).clip(1e-3)
        tables[name] = frame
    return tables


def pooled(tables, *names):
    """Return columns of the pooled rows as tensors, the first centered."""
    whole = pd.concat(tables.values())
    x, *others = (torch.tensor(whole[name].to_numpy(float)) for name in ("x", *names))
    return x - x.mean(), x.mean(), *others


def prior(method, name):
    """Return the printed prior of a parameter as a distribution."""
    line = next(one for one in method.priors().splitlines() if one.startswith(f"{name} ~ "))
    return eval(f"dist.{line.split(' ~ ')[1]}")


def linear(method, w, x, intercept, slope):
    """Return a linear predictor [S, N] with coefficients at the mean of x, and its log prior."""
    log_prior = prior(method, intercept).log_prob(w[:, 0]) + prior(method, slope).log_prob(w[:, 1])
    return w[:, :1] + w[:, 1:2] * x, log_prior


LOCATION, PARAMETER = ("Intercept", "b[x]"), ("Intercept_{0}", "b_{0}[x]")


def beta(y, eta, other):
    phi = other.exp()
    return dist.Beta(phi * eta.sigmoid(), phi * (-eta).sigmoid()).log_prob(y)


def negative_binomial(y, eta, other):
    shape, total = other.exp(), torch.logaddexp(eta, other)
    choose = torch.lgamma(y + shape) - torch.lgamma(shape) - torch.lgamma(y + 1)
    return choose + shape * (other - total) + y * (eta - total)


def zero_inflated(y, eta, other):
    count = y * eta - eta.exp() - torch.lgamma(y + 1) - softplus(other)
    return torch.where(y == 0, torch.logaddexp(-softplus(-other), count), count)


def weibull(y, eta, other, seen):
    return seen * (other + (other.exp() - 1) * y.log() + eta) - (other.exp() * y.log() + eta).exp()


CASES = {
    "beta": ("share", "phi", beta, ()),
    "negative_binomial": ("count", "shape", negative_binomial, ()),
    "zero_inflated_poisson": ("inflated", "zi", zero_inflated, ()),
    "weibull": ("time", "shape", weibull, ("seen",)),
}


@pytest.mark.parametrize("family", others_slow(CASES, ("beta",)))
def test_parameters_with_formulas_have_the_posterior_of_the_pooled_rows(family):
    response, parameter, log_density, more = CASES[family]
    left = f"censored({response}, seen)" if more else response
    tables = frames()
    method, _, draws = fitted({left: f"{left} ~ x", parameter: "~ x"}, tables, family=family)
    x, middle, y, *others = pooled(tables, response, *more)

    def posterior(w):
        eta, first = linear(method, w[:, :2], x, *LOCATION)
        other, second = linear(method, w[:, 2:], x, *(n.format(parameter) for n in PARAMETER))
        return first + second + log_density(y, eta, other, *others).sum(-1)

    b, end = f"b_{parameter}", f"Intercept_{parameter}"
    names = [lambda d: d["Intercept"] + middle * d["b"][:, 0], "b"]
    names += [lambda d: d[end] + middle * d[b][:, 0], b]
    assert_moments(draws, moments(posterior, 4), names)


@pytest.fixture(scope="module")
def normal():
    """Return tables, method, run and draws of normal responses with effects of clients in both."""
    tables = frames()
    formula = {"y": "y ~ x + (1 | client)", "sigma": "~ x"}
    return tables, *fitted(formula, tables, priors={"sd": dist.Gamma(8.0, 12.0)})


def test_deviations_with_a_formula_have_the_posterior_without_effects_of_clients(normal):
    tables, method, _, draws = normal
    x, middle, y = pooled(tables, "y")
    owner = np.repeat(np.arange(len(SIZES)), list(SIZES.values()))
    member = torch.tensor(np.eye(len(SIZES))[owner])

    def posterior(w):
        eta, first = linear(method, w[:, :2], x, *LOCATION)
        other, second = linear(method, w[:, 2:4], x, "Intercept_sigma", "b_sigma[x]")
        sd = w[:, 4].exp()
        scales = prior(method, "sd_client").log_prob(sd) + w[:, 4]
        # The effect of a client is integrated out: Sherman and Morrison for each client.
        precision, residual = (-2 * other).exp(), y - eta
        total = precision @ member
        along = (precision * residual) @ member
        shrunk = 1 / (sd[:, None] ** -2 + total)
        square = (precision * residual.square()).sum(-1) - (along.square() * shrunk).sum(-1)
        log_det = 2 * other.sum(-1) - shrunk.log().sum(-1) + 2 * len(SIZES) * w[:, 4]
        return first + second + scales - 0.5 * (square + log_det)

    names = [lambda d: d["Intercept"] + middle * d["b"][:, 0], "b"]
    names += [lambda d: d["Intercept_sigma"] + middle * d["b_sigma"][:, 0], "b_sigma"]
    names += [lambda d: d["sd_client"].log()]
    assert_moments(draws, moments(posterior, 5), names)


def test_results_name_the_parameter(normal):
    _, _, run, draws = normal
    table = run.summary()
    names = ["b[x]", "Intercept", "b_sigma[x]", "Intercept_sigma", "sd_client"]
    assert table.index.tolist() == names
    assert run.hypothesis("b_sigma[x] > 0")["probability"].item() > 0.99
    narrow, wide = (run.predict({"x": [at]}, "bern").values["sd"] for at in (-1.5, 1.5))
    expected = draws["Intercept_sigma"] + 1.5 * draws["b_sigma"][:, 0]
    expected = expected.exp().square().mean().sqrt()
    assert float(wide) == pytest.approx(float(expected), rel=0.15)
    assert float(narrow) < 0.5 * float(wide)
    assert effects.conditional(run, "x", points=3)["mean"].is_monotonic_increasing


def test_effects_of_groups_on_a_parameter_have_its_name():
    formula = {"y": "y ~ x + (1 | client)", "sigma": "~ 0 + x + (1 | client)"}
    tables = federations.from_frames(frames())
    method = pyrofl.regression(formula, tables)
    run = pyrofl.fit(method, tables, rounds=1, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one round is not enough, nor are 50 draws
        table = effects.groups(run, total=True, draws=50)
    names = [(level, term) for _, level, term in table.index]
    assert names[0] == ("bern", "Intercept")
    assert names[len(SIZES)] == ("bern", "sigma_Intercept")
    # Without an intercept in the population, the total of sigma is the deviation of the client.
    assert table["mean"].xs("sigma_Intercept", level="term").abs().max() < 1.5
    assert table["mean"].xs("Intercept", level="term").mean() == pytest.approx(1, abs=1)
    assert "sd_sigma_client ~ HalfNormal(2.5)" in method.priors()
    assert "eta_sigma = eta_sigma + r_sigma_client" in method.program()
    assert "Intercept_sigma" not in method.program()


def test_priors_of_parameters_are_replaced_by_name():
    user = {"b_sigma": dist.StudentT(3.0, 0.0, 1.0), "Intercept_sigma": dist.Normal(0.0, 1.0)}
    formula = {"y": "y ~ x", "sigma": "~ x"}
    tables = federations.from_frames(frames())
    text = pyrofl.regression(formula, tables, priors=user).priors()
    assert "b_sigma[x] ~ StudentT(df=3.0, loc=0.0, scale=1.0)" in text
    assert "Intercept_sigma ~ Normal(loc=0.0, scale=1.0)" in text
    last = {"b_sigma[x]": dist.Normal(0.0, 0.1)}
    assert (
        "b_sigma[x] ~ Normal(loc=0.0, scale=0.1)"
        in pyrofl.regression(formula, tables, priors=last).priors()
    )


@pytest.mark.parametrize(
    ("formula", "how", "text"),
    [
        ({"y": "y ~ x", "sgima": "~ x"}, {}, "did you mean sigma"),
        ({"y": "y ~ x", "sigma": "x"}, {}, "formula of sigma is 'x'; expected '~ x'"),
        ({"y": "y ~ x", "sigma": "~ "}, {}, "expected predictors after '~'"),
        ({"y": "y ~ x", "sigma": "~ z"}, {}, "unknown column 'z'"),
        ({"y": "y ~ x", "sigma": "~ y"}, {}, "column y is in the response and among"),
        ({"y": "y ~ x", "sigma": "~ x +* x"}, {}, "is not a formula"),
        ({"sigma": "~ x"}, {}, "formula has no response"),
        ({}, {}, "formula has no response"),
        ({"z": "y ~ x"}, {}, "formula of 'z' has the response y"),
        ({"seen": "seen ~ x", "sigma": "~ x"}, {"family": "bernoulli"}, "family has no parameter"),
        (
            {"y": "y ~ x", "sigma": "~ x"},
            {"priors": {"sigma": dist.Gamma(2.0, 2.0)}},
            "unknown prior",
        ),
        ({"y": "y ~ x", "shape": "~ x"}, {}, "unknown parameter of the family 'shape'"),
    ],
)
def test_mistakes_in_formulas_of_parameters_are_refused_in_a_line(formula, how, text):
    with pytest.raises(ValueError, match=text) as error:
        pyrofl.regression(formula, federations.from_frames(frames()), **how)
    assert "\n" not in str(error.value)


def test_a_constant_column_of_a_parameter_is_named():
    tables = {name: frame.assign(c=1.0) for name, frame in frames().items()}
    with pytest.warns(UserWarning, match="column c of sigma is constant"):
        pyrofl.regression({"y": "y ~ x", "sigma": "~ c"}, federations.from_frames(tables))
