"""Wrong formulas, tables, priors and names end in one clear line before any fit."""

import math
import warnings

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations


def frames():
    random = np.random.default_rng(0)
    found = {}
    for k, n in enumerate((5, 8, 12)):
        x = random.normal(size=n)
        frame = pd.DataFrame(
            {"x": x, "y": 1 + x, "n": 5, "zero": 0.0, "minus": -1.0, "tiny": 1e-10}
        )
        frame["g"] = [["no", "yes"][i % 2] for i in range(n)]
        frame["grade"] = [["low", "mid", "top"][i % 3] for i in range(n)]
        frame["died"], frame["count"] = [i % 2 for i in range(n)], np.arange(n)
        frame["time"] = random.gamma(2.0, size=n)
        frame["far"] = np.where(np.arange(n) == 1, np.inf, x)
        frame["none"], frame["lists"] = None, [[1]] * n
        frame["mixed"] = [1 if i % 2 else "a" for i in range(n)]
        frame["day"] = pd.Timestamp("2020-01-01")
        found[f"site {k}"] = frame
    return found


def refusal(formula, tables=None, **how):
    """Return the message of the error that a regression raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError) as error:  # noqa: PT011 (tests compare the message)
            pyrofl.regression(formula, federations.from_frames(tables or frames()), **how)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        ("", "expected one '~' with a response before it"),
        ("~", "expected one '~' with a response before it"),
        ("~ x", "expected one '~' with a response before it"),
        ("y", "expected one '~' with a response before it"),
        ("y ~ x ~ g", "expected one '~' with a response before it"),
        ("y ~ x + (1|", "its parentheses do not match"),
        ("y ~ x + 1|client)", "its parentheses do not match"),
        ("y ~ x | client", "expected group terms in parentheses"),
        ("y ~ (1 || client || item)", "expected one '|'"),
        ("y ~ (| client)", "expected one '|'"),
        ("y ~ (1 | )", "expected one '|'"),
        ("y ~ (1 | client/)", "expected names of columns after '|'"),
        ("y ~ (1 | log(x))", "expected names of columns after '|'"),
        ("y ~ (0 | client)", "(0 | client) has no coefficient"),
        ("y ~ (x | client) + (1 | client)", "client has two group terms"),
        ("y ~ (1 | ward)", "unknown column 'ward'"),
        ("y ~ z", "unknown column 'z'"),
        ("y ~ grad", "did you mean grade?"),
        ("y ~ has space", "unexpected 'space'; expected + - * : or / between terms"),
        ("y ~ x *", "'x *' is not a formula"),
        ("y ~ x:", "'x:' is not a formula"),
        ("y ~ x^2", "Unexpected character: ^; expected {x ** 2} for powers"),
        ("y ~ x; g", "Unexpected character: ;"),
        ("y ~ 1/x", "'1/x' is not a formula"),
        ("y ~ 3", "has the number 3 as a term"),
        ("y ~ __import__('os')", "is not a formula"),
        ("y ~ foo(x)", "unknown name 'foo'"),
        ("y ~ factor(g)", "unknown name 'factor'; expected C(x)"),
        ("Surv(time, died) ~ x", "unknown name 'Surv'; expected censored(time, event)"),
        ("y ~ np.foo(x)", "has no attribute 'foo'"),
        ("y ~ offset(g)", "offset() can only be used with numeric variables"),
        ("y ~ offset()", "offset() missing 1 required positional argument"),
        ("y ~ log(x)", "log(x) is not a finite number in row"),
        ("y ~ scale(zero)", "scale(zero) is not a finite number in row 1"),
        ("y ~ center(g)", "column g holds text; expected numbers, such as center(age)"),
        ("y ~ poly(x, 0)", "its degree is 0; expected at least 1"),
        ("y ~ bs(x)", "Must specify either 'df' or 'knots'"),
        ("y ~ bs(x, df=1)", "df=1 is too small"),
        ("y ~ cr(x, df=4)", "cr() in 'cr(x, df=4)' is not supported"),
        ("y ~ far", "site 0: far is not a finite number in row 2"),
        ("y ~ none", "no client has a row without missing values"),
        ("y ~ lists", "site 0: column lists holds values of type list"),
        ("y ~ mixed", "site 0: column mixed holds values of type int, str"),
        ("y ~ day", "site 0: column day holds values of type datetime64"),
        ("y ~ y", "column y is in the response and among the predictors"),
        ("log(y) ~ x", "response log(y) is"),
        ("g ~ x", "response g holds text with 2 levels"),
        ("far ~ x", "response far is inf in row 2"),
        ("p(died) ~ x", "expected two columns: p(successes, trials)"),
        ("censored(time) ~ x", "expected two columns: p(successes, trials)"),
    ],
)
def test_wrong_formulas(formula, text):
    assert text in refusal(formula)


@pytest.mark.parametrize(
    ("formula", "how", "text"),
    [
        ("died ~ x", {"family": "binomial"}, "needs the number of trials"),
        ("p(died, n) ~ x", {"family": "bernoulli"}, "has a column of trials"),
        ("p(count, n) ~ x", {"family": "binomial"}, "from 0 to the number of trials"),
        ("p(died, g) ~ x", {"family": "binomial"}, "column g holds text; expected numbers"),
        ("censored(time, g) ~ x", {"family": "weibull"}, "column g holds text; expected numbers"),
        ("censored(time, n) ~ x", {"family": "weibull"}, "expected 1 for an event"),
        ("censored(zero, died) ~ x", {"family": "weibull"}, "expected numbers above 0"),
        ("time ~ 1", {"family": "cox"}, "family cox needs a predictor"),
        ("time ~ x + (1 | client)", {"family": "cox"}, "family cox has no group terms"),
        ("minus ~ x", {"family": "gamma"}, "expected numbers above 0"),
        ("tiny ~ x", {"family": "gamma"}, "above 0, at least 1e-9 in their unit"),
        ("minus ~ x", {"family": "hurdle_gamma"}, "expected numbers of at least 0"),
        ("y ~ x", {"family": "hurdle_poisson"}, "expected whole numbers of at least 0"),
        ("grade ~ 0 + x", {"family": "cumulative"}, "needs an intercept"),
        ("g ~ x", {"family": "cumulative"}, "has 2 levels (no, yes); expected 3 or more"),
        ("grade ~ x", {"family": "bernoulli"}, "holds text with 3 levels"),
        ("y ~ x", {"weights": "w"}, "unknown column 'w'"),
        ("y ~ x", {"weights": "g"}, "column g holds text; expected numbers"),
        ("y ~ x", {"weights": "minus"}, "expected weights of at least 0"),
        ("y ~ x", {"weights": "zero"}, "all its training rows have weight 0"),
        ("y ~ x", {"family": "gausian"}, "did you mean gaussian?"),
        ("y ~ x", {"link": "probit"}, "expected one of identity, log"),
        ("y ~ x", {"client": "g"}, "expected one, as it identifies the client"),
        ("y ~ k(x)", {"namespace": {"k": 3}}, "'int' object is not callable"),
        ("y ~ k(x)", {"namespace": {"k": lambda v: v - v.mean()}}, "depends on other rows"),
        ("y ~ k(x)", {"namespace": {"k": lambda v: math.nan * v}}, "is not a finite number"),
    ],
)
def test_wrong_families_and_columns(formula, how, text):
    assert text in refusal(formula, **how)


@pytest.mark.parametrize(
    ("name", "prior", "text"),
    [
        ("b", dist.Normal(torch.zeros(2), 1.0), "is of shape [2]"),
        ("b", "normal(0, 1)", "expected a distribution such as dist.Normal(0.0, 1.0)"),
        ("b", dist.Bernoulli(0.5), "expected a continuous distribution of numbers"),
        ("sigma", dist.Normal(0.0, 1.0), "expected a continuous distribution of positive numbers"),
        ("sd", dist.Normal(0.0, 1.0), "expected a continuous distribution of positive numbers"),
        ("corr", dist.Beta(1.0, 1.0), "expected the concentration of an LKJ prior"),
        ("zi", dist.Beta(1.0, 1.0), "unknown prior 'zi'"),
        ("treat", dist.Normal(0.0, 1.0), "unknown prior 'treat'"),
    ],
)
def test_wrong_priors(name, prior, text):
    assert text in refusal("y ~ x + (x | client)", priors={name: prior})


def test_probabilities_need_priors_on_the_unit_interval():
    given = {"priors": {"hu": dist.HalfNormal(1.0)}, "family": "hurdle_poisson"}
    assert "distribution of numbers from 0 to 1" in refusal("count ~ x", **given)


def one(name, value):
    """Return a change of one client's column."""

    def change(tables):
        tables["site 1"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (one("x", "a"), "and text at site 1, such as 'a' in row 1 of site 1; expected one type"),
        (one("g", True), "column g holds numbers at site 1, and text at site 0, site 2"),
        (one("x", [[1]] * 8), "site 1: column x holds values of type list"),
        (lambda t: t.update({"site 1": t["site 1"].drop(columns="x")}), "x is missing at site 1"),
        (lambda t: t.update({"site 1": t["site 1"][:0]}), "site 1 has no row"),
        (lambda t: t.update({"site 1": 3}), "expected a data frame"),
        (
            lambda t: t.update({n: f.rename(columns={"x": "g"}) for n, f in t.items()}),
            "two columns of one name",
        ),
        (lambda t: t.update({n: f.assign(x=np.nan) for n, f in t.items()}), "no client has a row"),
        (
            lambda t: t["site 1"].insert(0, "client", ["a", "b"] * 4),
            "expected one, as it identifies the client",
        ),
    ],
)
def test_wrong_tables(change, text):
    tables = frames()
    change(tables)
    assert text in refusal("y ~ x + g", tables)


@pytest.mark.parametrize("data", [3, None, {"a": frames()["site 0"]}, "table.csv"])
def test_other_data(data):
    with pytest.raises(ValueError, match=r"data is .*expected"):
        pyrofl.regression("y ~ x", data)


@pytest.mark.parametrize("low", [0.999, 0.0999])
def test_a_narrow_prior_of_the_noise_has_the_posterior_of_known_noise(low):
    """The noise of the rows is about 1: the second prior contradicts it."""
    random = np.random.default_rng(0)
    frames = {}
    for name in "abcdef":
        x = random.normal(size=12)
        y = 1 + random.normal(0, 0.5) + (0.3 + random.normal(0, 0.3)) * x + random.normal(size=12)
        frames[name] = pd.DataFrame({"x": x, "y": y})
        random.poisson(3, 12)
    data = federations.from_frames(frames)
    draws = []
    for fixed, priors in ({}, {"sigma": dist.Uniform(low, low + 0.0002)}), ({"sigma": low}, {}):
        formula = {"y": "y ~ 1 + (1 + x | client)", **fixed}
        method = pyrofl.regression(formula, data, priors=priors)
        posterior = pyrofl.fit(method, data, progress=False).posterior(2000)
        log_sd = posterior["sd_client"].flatten(0, 1).log()
        draws.append(torch.cat([posterior["Intercept"].reshape(-1, 1), log_sd], -1))
    one, other = draws
    sd = other.std(0)
    assert float(((one.mean(0) - other.mean(0)) / sd).abs().max()) < 4 * (2 / 1000) ** 0.5
    assert float((one.std(0) / sd).log().abs().max()) < 4 * (2 / 1000) ** 0.5
