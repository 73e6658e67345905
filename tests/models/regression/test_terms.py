"""Terms gp(x), mo(x) and cs(x), families sratio and acat, and censored gamma times."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy import special, stats

pytest.importorskip("formulae")

import pyrofl
from pyrofl import effects, federations
from pyrofl.models.regression.distributions import adjacent, stopping
from pyrofl.models.regression.prediction import posterior_draws
from pyrofl.models.regression.smooths import Monotonic, Process, process_scale
from pyrofl.models.regression.survival import log_gamma_survival

GRADES = ("low", "middle", "high", "top")


def frames(sizes=(40, 25, 35), seed=0):
    """Return tables of clients whose responses depend on a level x and on z."""
    random = np.random.default_rng(seed)
    tables = {}
    for number, rows in enumerate(sizes):
        x, z = random.integers(1, 5, rows), random.uniform(0, 10, rows)
        y = np.array([0, 0.3, 1.6, 2.0])[x - 1] + np.sin(z) + random.normal(0, 0.5, rows)
        tables[f"h{number}"] = pd.DataFrame(
            {"x": x, "z": z, "y": y, "g": np.digitize(y, [0, 1, 2]), "t": np.exp(y), "c": 3}
        ).assign(
            grade=pd.Categorical(np.array(GRADES)[x - 1], GRADES, ordered=True),
            text=np.array(GRADES)[x - 1],
            died=(random.uniform(size=rows) < 0.7).astype(int),
        )
    return tables


def regression(formula, tables=None, **how):
    return pyrofl.regression(formula, federations.from_frames(tables or frames()), **how)


@pytest.mark.parametrize("length", [0.15, 0.3, 0.6])
def test_sines_have_the_covariance_of_the_process(length):
    """Within the interval of the data the error is that of the truncated series (c = 3, k = 90)."""
    process = Process(0.0, 2.0, 90, 3.0)
    x = np.linspace(0, 2, 9)
    frequencies = torch.tensor(process.frequencies)
    sd, length_scale = torch.tensor(1.5), torch.tensor(length, dtype=torch.float64)
    scale = process_scale(frequencies, process.edge, sd, length_scale).numpy()
    covariance = (process.sines(x) * scale**2) @ process.sines(x).T
    expected = 1.5**2 * np.exp(-((x[:, None] - x) ** 2) / (2 * length**2))
    np.testing.assert_allclose(covariance, expected, atol=2e-3)


def test_columns_of_a_process_are_the_centered_sines_of_the_pooled_rows():
    tables = frames()
    method = regression("y ~ gp(z, k=7) + x", tables)
    z = np.concatenate([table.z for table in tables.values()])
    edge, middle = 1.5 * (z.max() - z.min()) / 2, (z.max() + z.min()) / 2
    sines = np.sin(np.arange(1, 8) * np.pi / (2 * edge) * (z[:, None] - middle + edge))
    assert list(method.design.places)[:2] == ["gp(z)[1]", "gp(z)[2]"]
    np.testing.assert_allclose(
        method.design.federation().x[:, :7], sines - sines.mean(0), atol=1e-12
    )
    shortest = 1.75 * edge / 7
    assert f"lscale_gp_z ~ InverseGamma(3.0, {8.4 * shortest:.4g})" in method.priors()
    assert stats.invgamma(3, scale=8.4 * shortest).cdf(shortest) == pytest.approx(0.01, rel=0.02)


def test_monotonic_effects_are_those_of_the_paper():
    term, zeta, b = Monotonic(2.0, 6.0), np.array([0.1, 0.2, 0.3, 0.4]), 1.7
    columns = term(np.array([2, 3, 4, 5, 6]))
    effect = b * columns[:, 0] + b * columns[:, 1:] @ (4 * zeta - 1)
    np.testing.assert_allclose(effect, b * 4 * np.insert(zeta.cumsum(), 0, 0))


@pytest.mark.parametrize("center", [True, False])
def test_the_intercept_of_a_monotonic_effect_is_that_of_the_lowest_level(center):
    tables = federations.from_frames(frames())
    run = pyrofl.fit(pyrofl.regression("y ~ mo(x)", tables, center=center), tables, progress=False)
    means = effects.predict(run, {"x": [1, 2, 3, 4]}, "h0").mean
    drawn = run.to_arviz(draws=2000)["posterior"]
    zeta = drawn["zeta_mo_x"].values[0]
    steps = 3 * drawn["b"].values[0] * np.insert(zeta.cumsum(1), 0, 0, axis=1)
    expected = (drawn["Intercept"].values[0][:, None] + steps).mean(0)
    error = float(drawn["Intercept"].std()) / 2000**0.5
    np.testing.assert_allclose(means, expected, atol=6 * error)
    assert (np.diff(means) > 0).all()


def test_declared_categories_are_levels_in_their_order():
    tables = frames()
    codes = regression("y ~ mo(grade)", tables).design.federation().x
    numbers = regression("y ~ mo(x)", tables).design.federation().x
    np.testing.assert_array_equal(codes, numbers)


def test_priors_and_labels_have_the_names_of_the_terms():
    method = regression(
        {"y": "y ~ mo(x) + gp(z)", "sigma": "~ mo(x)"},
        priors={
            "zeta_mo_x": 2.0,
            "lscale_gp_z": dist.LogNormal(0.0, 1.0),
            "b[mo(x)]": dist.StudentT(3.0, 0.0, 1.0),
        },
    )
    for line in (
        "zeta_mo_x ~ Dirichlet([2.0, 2.0, 2.0])",
        "lscale_gp_z ~ LogNormal(loc=0.0, scale=1.0)",
        "b[mo(x)] ~ StudentT(df=3.0, loc=0.0, scale=1.0)",
        "zeta_mo_x_sigma ~ Dirichlet([1.0, 1.0, 1.0])",
    ):
        assert line in method.priors()
    _, labels = method.axes()
    assert labels["zeta_mo_x_term"] == ["mo(x)[1]", "mo(x)[2]", "mo(x)[3]"]
    specific = regression("g ~ z + cs(x)", family="acat", priors={"cs_x": dist.Normal(0.0, 0.5)})
    assert "cs_x ~ Normal(loc=0.0, scale=0.5)" in specific.priors()
    assert specific.axes()[1]["cs_x_term"] == ["0", "1", "2"]


def test_probabilities_of_ordered_categories_are_those_of_their_definitions():
    eta, cuts = torch.tensor([0.3, -1.0]), torch.tensor([-0.5, 0.8, 0.2])
    p = torch.softmax(stopping(eta, cuts), -1)
    np.testing.assert_allclose(stopping(eta, cuts).exp().sum(-1), 1, rtol=1e-6)
    at_least = p.flip(-1).cumsum(-1).flip(-1)
    hazard = (p / at_least)[:, :-1]
    np.testing.assert_allclose(hazard, torch.sigmoid(cuts - eta[:, None]), rtol=1e-5)
    p = torch.softmax(adjacent(eta, cuts), -1)
    odds = (p[:, 1:] / p[:, :-1]).log()
    np.testing.assert_allclose(odds, eta[:, None] - cuts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ratio", [1e-9, 0.1, 0.9, 1.0, 1.2, 3.0, 20.0])
def test_survival_of_a_gamma_variable_and_its_derivatives(ratio):
    a = np.geomspace(0.02, 2000, 25)
    exact = special.gammaincc(a, a * ratio)
    seen = exact > 1e-250
    shape, x = torch.tensor(a, requires_grad=True), torch.tensor(a * ratio, requires_grad=True)
    value = log_gamma_survival(shape, x)
    np.testing.assert_allclose(value.detach().numpy()[seen], np.log(exact[seen]), atol=1e-8)
    by_shape, by_x = (g.numpy() for g in torch.autograd.grad(value.sum(), (shape, x)))
    a, by_shape, by_x, exact = a[seen], by_shape[seen], by_x[seen], exact[seen]
    hazard = np.exp(stats.gamma(a).logpdf(a * ratio)) / exact
    np.testing.assert_allclose(by_x * a * ratio, -hazard * a * ratio, rtol=1e-6, atol=1e-7)
    step = 1e-5 * a
    ends = [np.log(special.gammaincc(a + sign * step, a * ratio)) for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(by_shape, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("formula", "how", "message"),
    [
        (
            "y ~ mo(z)",
            {},
            r"mo\(z\) cannot be evaluated: a level is .*; expected whole numbers, or s",
        ),
        (
            "y ~ mo(text)",
            {},
            r"it holds text, whose order is unknown; expected whole numbers, or pd",
        ),
        (
            "y ~ mo(c)",
            {},
            r"mo\(c\) cannot be evaluated: there are 1 levels; expected three or more",
        ),
        (
            "y ~ mo(died)",
            {},
            r"there are 2 levels; expected three or more, or x instead of mo\(x\)",
        ),
        ("y ~ mo(x, 3)", {}, r"cannot be evaluated: expected one variable, such as mo\(stage\)"),
        ("y ~ mo(x):z", {}, r"inside mo\(x\):z; expected a term of its own, or C\(x\) instead of"),
        ("y ~ s(z):text", {}, r"a term of its own, or bs\(z, df=5\) instead of s\(z\) in prod"),
        ("y ~ s(s(z))", {}, r"has s\(z\) inside s\(s\(z\)\); expected a term of its own$"),
        ("y ~ s(z, df=1000)", {}, r"df is 1000; expected a whole number from 5 to 100"),
        ("y ~ s(z, bs='cr')", {}, r"unexpected keyword argument 'bs'; expected s\(x, df=10\)$"),
        (
            "y ~ z + (mo(x) | client)",
            {},
            r"has mo\(\); expected the variable itself, or mo\(\) as a",
        ),
        (
            "y ~ z + (gp(x) | client)",
            {},
            r"has gp\(\); expected poly\(\) or bs\(\), or gp\(\) as a",
        ),
        ("y ~ gp(c)", {}, r"gp\(c\) cannot be evaluated: all values are 3; expected a variable"),
        ("y ~ gp(z, k=3)", {}, r"k is 3; expected a whole number from 5 to 100"),
        ("y ~ gp(z, c=1)", {}, r"c is 1; expected a number from 1.2 to 10"),
        ("y ~ gp(z, c='a')", {}, r"c is 'a'; expected a number from 1.2 to 10"),
        ("g ~ cs(1)", {"family": "acat"}, r"it has no variable; expected one, such as cs\(x\)"),
        ("g ~ cs(x) + x", {"family": "acat"}, r"cs\(x\) and x are both terms, which only priors"),
        ("y ~ gp(z) + gp(z, k=9)", {}, r"has two terms gp\(\) of z; expected one"),
        (
            "y ~ cs(x)",
            {},
            r"cs\(x\) has an effect at each threshold.*expected family sratio or acat",
        ),
        ("g ~ cs(x)", {"family": "cumulative"}, r"would let thresholds of family cumulative cross"),
        (
            "g ~ cs(text)",
            {"family": "acat"},
            r"column text holds text; expected numbers, such as cs\(age",
        ),
        (
            "g ~ gp(z)",
            {"family": "categorical"},
            r"has no gp\(\); expected bs\(\) instead of gp\(\)",
        ),
        ("g ~ mo(x)", {"family": "categorical"}, r"has no mo\(\); expected C\(x\) instead of mo"),
        (
            "y ~ mo(x)",
            {"priors": {"zeta_mo_x": -1}},
            r"concentration of a Dirichlet prior, a number",
        ),
        ("y ~ gp(z)", {"priors": {"lscale_gp_z": dist.Normal(0.0, 1.0)}}, r"of positive numbers"),
        (
            "g ~ z",
            {"family": "sratio", "priors": {"cut_first": dist.Normal(0.0, 1.0)}},
            "unknown pri",
        ),
        ("p(died, c) ~ mo(x) + trials(c)", {"family": "binomial"}, r"unknown name 'trials'"),
    ],
)
def test_other_uses_are_refused(formula, how, message):
    with pytest.raises(ValueError, match=message):
        regression(formula, **how)


@pytest.mark.parametrize("call", ["s(z, {})", "gp(z, k={})", "s(z, by={})", "poly(z, {})"])
@pytest.mark.parametrize("other", ["x", "text", "x + 1"])
def test_a_second_variable_is_refused_without_its_values(call, other):
    with pytest.raises(
        ValueError, match=r"\(\) takes one variable; expected .*bs\(x, df=5\):tr"
    ) as e:
        regression(f"y ~ {call.format(other)}")
    assert len(str(e.value)) < 250


@pytest.mark.parametrize("call", ["s({})", "gp({})", "poly({}, 2)", "bs({}, df=5)", "scale({})"])
@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (
            "np.log(z - 5)",
            r"h0: np.log\(z - 5\) is not a finite number in row \d+; expected finite",
        ),
        ("z / (x - 1)", r"h0: .*is not a finite number in row \d+; expected finite numbers"),
        ("text", r"column text holds text; expected numbers, such as (s|gp|poly|bs|scale)\(age\)"),
        ("x + text", r"column text holds text; expected numbers"),
    ],
)
def test_variables_without_finite_numbers_are_refused(call, variable, message):
    with pytest.raises(ValueError, match=message):
        regression(f"y ~ {call.format(variable)}")


@pytest.mark.parametrize(
    ("response", "family"),
    [
        *[(f"{call}(y)", "gaussian") for call in ("s", "gp")],
        *[(text, "gaussian") for text in ("mo(x)", "poly(y, 2)", "bs(y, df=5)", "C(x)")],
        ("cs(g)", "acat"),
        ("C(died)", "bernoulli"),
    ],
)
def test_terms_are_no_responses(response, family):
    with pytest.raises(ValueError, match=r"is a term with coefficients|is an expression"):
        regression(f"{response} ~ z", family=family)


def test_columns_inside_a_term_have_no_warnings():
    regression("y ~ gp(x) + s(z, df=20)")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("wide", r"mo\(wide\) has 12 levels without a row \(6, 7.*recode the levels to 0, 1, 2"),
        ("stage", r"mo\(stage\) has 1 levels without a row \(none\); only priors separate"),
    ],
)
def test_levels_without_a_row_have_one_warning(column, message):
    more = {"wide": lambda f: 5 * f.x, "stage": lambda f: f.grade.cat.add_categories("none")}
    tables = {name: frame.assign(**more) for name, frame in frames().items()}
    with pytest.warns(UserWarning, match=message) as caught:
        regression(f"y ~ mo({column})", tables)
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:estimates of")
def test_conditional_effects_are_at_levels_of_a_monotonic_effect():
    tables = federations.from_frames(frames())
    run = pyrofl.fit(regression("y ~ mo(x) + z"), tables, rounds=1, progress=False)
    table = effects.conditional(run, "x")
    assert table.x.tolist() == [1, 2, 3, 4]
    assert effects.conditional(run, "z", by="x", points=3).x.tolist() == [1, 2, 3, 4] * 3
    level = round(np.mean([x for frame in frames().values() for x in frame.x]))
    expected = effects.conditional(run, "z", at={"x": level}, points=2)["mean"]
    np.testing.assert_allclose(effects.conditional(run, "z", points=2)["mean"], expected)


def test_rows_beyond_a_process_are_only_refused_and_others_warn():
    columns = regression("y ~ gp(z)").design.population
    (text,) = columns.beyond(pd.DataFrame({"z": [11.0]}))
    assert "was fitted between" in text
    assert list(columns.beyond(pd.DataFrame({"z": [40.0]}))) == []


@pytest.mark.filterwarnings("ignore:estimates of")  # of one round
def test_rows_outside_of_levels_or_of_the_interval_are_refused():
    tables = federations.from_frames(frames())
    run = pyrofl.fit(pyrofl.regression("y ~ mo(x)", tables), tables, rounds=1, progress=False)
    with pytest.raises(
        ValueError, match=r"a level is 5; expected whole numbers from 1 to 4, as of"
    ):
        run.predict({"x": [5]}, "h0")
    with pytest.raises(ValueError, match=r"a level is 1.5; expected whole numbers from 1 to 4"):
        run.predict({"x": [1.5]}, "h0")
    columns = pyrofl.regression("y ~ gp(z)", tables).design.population
    with pytest.raises(ValueError, match=r"a value is 40; the process is defined from -2.*larger"):
        columns.evaluate(pd.DataFrame({"z": [40.0]}))


def test_categories_of_sratio_have_the_probabilities_of_their_draws():
    tables = federations.from_frames(frames())
    method = pyrofl.regression("g ~ z + cs(x)", tables, family="sratio")
    run = pyrofl.fit(method, tables, progress=False)
    drawn = run.to_arviz(draws=2000)["posterior"]
    z, x = 4.0, 2.0
    cuts = drawn["cutpoints"].values[0] - drawn["cs_x"].values[0] * x
    eta = drawn["b"].values[0] * z
    hazard = special.expit(cuts - eta)
    whole = np.column_stack([hazard, np.ones(len(eta))])
    passed = np.column_stack([np.ones(len(eta)), np.cumprod(1 - hazard, 1)])
    expected = (whole * passed).mean(0)
    predicted = run.predict({"z": [z], "x": [x]}, "h0").frame().filter(like="p(")
    assert predicted.shape == (1, 4)
    np.testing.assert_allclose(
        predicted.to_numpy(dtype=float)[0], expected, atol=6 * 0.1 / 2000**0.5
    )


def test_censored_gamma_times_have_the_posterior_of_a_grid():
    """Within 0.1 standard deviations; the sum over a grid is exact to 1e-3 of them."""
    tables = frames()
    method = regression("censored(t, died) ~ 1", tables, family="gamma")
    run = pyrofl.fit(method, federations.from_frames(tables), progress=False)
    drawn = run.to_arviz(draws=4000)["posterior"]
    pooled = pd.concat(tables.values())
    time, is_event = pooled["t"].to_numpy(), pooled["died"].to_numpy() == 1
    eta, shape = np.linspace(0, 3, 121), np.linspace(0.4, 4, 121)
    a, b = np.meshgrid(shape, eta)
    rate = a / np.exp(b)
    log_p = np.log(stats.gamma(2, scale=10).pdf(a)) + stats.norm(0, 2.5).logpdf(
        b - np.log(time.mean())
    )
    for t, seen in zip(time, is_event, strict=True):
        law = stats.gamma(a, scale=1 / rate)
        log_p += law.logpdf(t) if seen else law.logsf(t)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    for name, values in (("Intercept", b), ("shape", a)):
        mean = (p * values).sum()
        sd = ((p * (values - mean) ** 2).sum()) ** 0.5
        assert float(drawn[name].mean()) == pytest.approx(mean, abs=0.1 * sd)
        assert float(drawn[name].std()) == pytest.approx(sd, rel=0.1)


def probabilities_of(family, odds):
    """Return probabilities [S, K] from the log odds of stopping, or of the lower neighbor."""
    if family == "acat":
        return special.softmax(np.column_stack([np.zeros(len(odds)), -odds.cumsum(1)]), 1)
    stops = np.column_stack([special.expit(odds), np.ones(len(odds))])
    return stops * np.column_stack([np.ones(len(odds)), np.cumprod(special.expit(-odds), 1)])


@pytest.mark.filterwarnings("ignore:estimates of")  # of two rounds
@pytest.mark.parametrize("family", ["sratio", "acat"])
@pytest.mark.parametrize("right", ["cs(x)", "1"])
def test_rows_without_a_drawn_predictor_have_the_probabilities_of_all_draws(right, family):
    tables = federations.from_frames(frames())
    method = pyrofl.regression(f"g ~ {right}", tables, family=family)
    run = pyrofl.fit(method, tables, rounds=2, progress=False)
    sites = posterior_draws(run).sites
    slopes = sites["cs_x"].numpy() if "cs" in right else 0.0
    for client, cells in ((None, [2]), ("h0", [1, 3])):
        predicted = run.predict({"x": cells}, client).frame().filter(like="p(").to_numpy(float)
        cuts = sites["cutpoints"].numpy()
        each = [probabilities_of(family, cuts - slopes * x).mean(0) for x in cells]
        np.testing.assert_allclose(predicted, each, rtol=1e-6)
    if right == "1":
        return
    table = effects.ratios(run)
    assert table.index.name == "odds ratio"
    assert table.index.tolist() == ["cs_x[0]", "cs_x[1]", "cs_x[2]"]
    np.testing.assert_allclose(table["median"], np.median(np.exp(slopes), 0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:estimates of")
def test_rows_whose_location_is_known_have_draws_of_the_other_parameters():
    tables = federations.from_frames(frames())
    method = pyrofl.regression({"y": "y ~ 0 + offset(z)", "sigma": "~ x"}, tables)
    run = pyrofl.fit(method, tables, rounds=2, progress=False)
    mean, sd = run.predict({"z": [4.0], "x": [2.0]}, None).frame()[["mean", "sd"]].to_numpy()[0]
    sites = posterior_draws(run).sites
    sigma = np.exp(sites["Intercept_sigma"].numpy() + 2.0 * sites["b_sigma"].numpy()[:, 0])
    square = (sigma**2).mean()
    assert mean == pytest.approx(4.0, abs=6 * (square / len(sigma)) ** 0.5)
    assert sd == pytest.approx(square**0.5, rel=6 / (2 * len(sigma)) ** 0.5)
    linpred = effects.row_draws(run, {"z": [4.0, 5.0], "x": [2.0, 2.0]})["predictions"]["linpred"]
    assert linpred.shape == (1, 2000, 2)
    assert (linpred.values == [4.0, 5.0]).all()


@pytest.mark.parametrize(
    ("priors", "code"),
    [
        ({"b": dist.Normal(0.0, 0.5)}, "Normal(loc=0.0, scale=0.5)"),
        ({"b": dist.Normal(0.0, 0.5), "cs_x": dist.StudentT(3.0, 0.0, 1.0)}, "StudentT(df=3.0, "),
    ],
)
def test_a_prior_of_all_coefficients_is_also_that_of_each_threshold(priors, code):
    method = regression("g ~ cs(x) + z", family="sratio", priors=priors)
    assert f"cs_x ~ {code}" in method.priors()
    assert "b[z] ~ Normal(loc=0.0, scale=0.5)" in method.priors()
