"""Smooth functions: columns, penalty, agreement of clients, and the curve that mgcv estimates."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
from scipy import integrate

pytest.importorskip("formulae")

import pyrofl
from pyrofl import effects, federations
from pyrofl.models.regression.smooths import Smooth


def frames(sizes=(30, 12, 41), seed=0):
    """Return tables of clients with a response that is a wave of x and a line of z."""
    random = np.random.default_rng(seed)
    tables = {}
    for number, rows in enumerate(sizes):
        x, z = random.uniform(0, 10, rows), random.normal(size=rows)
        y = 2 * np.sin(x) + 0.5 * z + random.normal(0, 0.5) + random.normal(0, 0.6, rows)
        tables[f"h{number}"] = pd.DataFrame({"x": x, "z": z, "y": y, "died": (y > 0).astype(int)})
    return tables


def regression(formula, tables=None, **how):
    return pyrofl.regression(formula, federations.from_frames(tables or frames()), **how)


@pytest.fixture
def smooth():
    """Return a smooth function of 40 values, and the values."""
    x = np.random.default_rng(1).uniform(-3, 7, 40)
    smooth = Smooth(x.min(), x.max(), 8)
    smooth.to_columns = smooth.centered(smooth.basis(x).sum(0), len(x))
    return smooth, x


def test_columns_span_the_splines_with_mean_0_and_the_first_is_the_line(smooth):
    curve, x = smooth
    columns = curve(x)
    np.testing.assert_allclose(columns.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(columns[:, 0], x - x.mean(), atol=1e-12)
    whole = np.column_stack([np.ones(len(x)), columns])
    assert np.linalg.matrix_rank(whole) == curve.df
    left = curve.basis(x) - whole @ np.linalg.lstsq(whole, curve.basis(x), rcond=None)[0]
    np.testing.assert_allclose(left, 0, atol=1e-10)


def test_the_sum_of_squares_of_coefficients_is_the_integral_of_the_second_derivative(smooth):
    curve, _ = smooth
    coefficients = np.random.default_rng(2).normal(size=curve.df - 1)
    grid = np.linspace(curve.low, curve.high, 20001)
    second = curve._splines().derivative(2)(grid) @ curve.to_columns @ coefficients
    integral = integrate.simpson(second**2, x=grid)
    assert integral == pytest.approx((coefficients[1:] ** 2).sum(), rel=1e-6)


def test_lines_continue_the_curve(smooth):
    curve, _ = smooth
    for end, sign in ((curve.low, -1), (curve.high, 1)):
        near, far, farther = curve(end + sign * np.array([1e-9, 1.0, 2.0]))
        np.testing.assert_allclose(farther - far, far - near, atol=1e-6)


def test_columns_of_clients_are_those_of_the_pooled_rows():
    tables = frames()
    method = regression("y ~ s(x, df=7) + z", tables)
    data = method.design.federation()
    x = np.concatenate([table.x for table in tables.values()])
    pooled = Smooth(x.min(), x.max(), 7)
    pooled.to_columns = pooled.centered(pooled.basis(x).sum(0), len(x))
    expected = pooled(x)
    expected[:, 1:] /= np.sqrt((expected[:, 1:] ** 2).sum() / len(x))
    assert list(method.design.places)[:3] == ["s(x)", "s(x)[1]", "s(x)[2]"]
    np.testing.assert_allclose(data.x[:, :6], expected, atol=1e-10)


def test_every_linear_predictor_may_have_smooth_functions_with_priors_by_name():
    method = regression(
        {"y": "y ~ s(x) + s(z, df=6)", "sigma": "~ s(x)"},
        priors={"sd_s_x": dist.Exponential(2.0), "b[s(x)]": dist.Normal(0.0, 1.0)},
    )
    for line in (
        "b[s(x)] ~ Normal(loc=0.0, scale=1.0)",
        "sd_s_x ~ Exponential(rate=2.0)",
        "sd_s_z ~ HalfNormal(",
        "sd_s_x_sigma ~ HalfNormal(2.5)",
    ):
        assert line in method.priors()
    assert ", s_x_sigma)" in method.program()
    assert "(s_z * x[..." in method.program()
    _, labels = method.axes()
    assert labels["s_z_term"] == ["s(z)[1]", "s(z)[2]", "s(z)[3]", "s(z)[4]"]


def test_coefficients_of_curves_have_no_priors_of_their_own():
    with pytest.raises(ValueError, match=r"unknown prior 's\(x\)\[1\]'"):
        regression("y ~ s(x)", priors={"s(x)[1]": dist.Normal(0.0, 1.0)})


def test_the_number_of_splines_may_be_the_second_argument():
    assert regression("y ~ s(x, 7)").design.terms == regression("y ~ s(x, df=7)").design.terms


@pytest.mark.parametrize(
    ("formula", "how", "message"),
    [
        ("y ~ s(x):z", {}, r"has s\(x\) inside s\(x\):z; expected a term of its own"),
        ("y ~ np.exp(s(x))", {}, r"has s\(x\) inside np.exp\(s\(x\)\); expected a term"),
        ("y ~ z + (s(x) | client)", {}, r"\(s\(x\) \| client\) has s\(\); expected poly\(\)"),
        ("y ~ s(x, df=4)", {}, r"s\(x, df=4\) cannot be evaluated: df is 4; expected a whole"),
        ("y ~ s(x, by=z)", {}, r"s\(x, by=z\) cannot be evaluated: s\(\) takes one variable"),
        ("y ~ s(c)", {}, r"s\(c\) cannot be evaluated: all values are 3; expected a variable"),
        ("y ~ s(x) + s(x, df=6)", {}, r"has two smooth functions of x; expected one"),
        ("y ~ s(x) + (1 | s_x)", {}, r"two parameters named sd_s_x; expected another name for s_x"),
        ("g ~ s(x)", {"family": "categorical"}, r"no smooth functions; expected bs\(\)"),
        ("y ~ te(x, z)", {}, r"unknown name 'te'; expected s\(x\) \+ s\(z\)"),
    ],
)
def test_other_uses_are_refused(formula, how, message):
    tables = {
        name: table.assign(c=3.0, s_x="u", g=np.array(["a", "b", "c"])[np.arange(len(table)) % 3])
        for name, table in frames().items()
    }
    with pytest.raises(ValueError, match=message):
        regression(formula, tables, **how)


def test_responses_that_a_curve_could_separate_get_no_warning_about_its_columns(recwarn):
    tables = {n: t.assign(died=(t.x > 5).astype(int)) for n, t in frames().items()}
    regression("died ~ s(x)", tables, family="bernoulli")
    texts = [str(one.message) for one in recwarn]
    assert [text for text in texts if "column s(x) separates" in text]
    assert not [text for text in texts if "s(x)[" in text]


# gam(y ~ s(x, bs = "bs", k = 10, m = c(3, 2)) + z + s(client, bs = "re"), method = "REML",
#     knots = list(x = low + (high - low) / 7 * (-3:10))) of mgcv 1.8-41 for the rows of the test:
# the curve at 1, 3, 5, 7 and 9, and its standard errors.
CURVE = np.array([1.211506, -0.266294, -2.389124, 1.066256, 0.227997])
ERRORS = np.array([0.098554, 0.115199, 0.087163, 0.092780, 0.098918])


def test_the_curve_is_that_of_mgcv():
    """Within 0.1 standard errors, of which the draws have 0.02; mgcv fixes sigma and the scales."""
    tables = federations.from_frames(frames((70, 40, 90, 30)))
    method = pyrofl.regression("y ~ s(x) + z + (1 | client)", tables)
    posterior = pyrofl.fit(method, tables, progress=False).to_arviz(draws=4000)["posterior"]
    columns = method.design.population.evaluate(pd.DataFrame({"x": [1, 3, 5, 7, 9.0], "z": 0.0}))
    line = posterior["b"].sel(term="s(x)").values[0][:, None] * columns[:, 0]
    curves = line + posterior["s_x"].values[0] @ columns[:, 1:9].T
    assert np.abs((curves.mean(0) - CURVE) / ERRORS).max() < 0.1
    assert np.abs(curves.std(0) / ERRORS - 1).max() < 0.1
    z = posterior["b"].sel(term="z").values
    assert abs(z.mean() - 0.521612) < 0.1 * 0.0365604
    assert abs(z.std() / 0.0365604 - 1) < 0.1
    sigma = posterior["sigma"].values
    assert abs(sigma.mean() - 0.5562273) < 0.2 * sigma.std()  # a mean, and a mode


def test_curves_beyond_the_training_rows_are_lines_with_a_warning():
    tables = federations.from_frames(frames())
    run = pyrofl.fit(pyrofl.regression("y ~ s(x)", tables), tables, progress=False)
    with pytest.warns(UserWarning, match=r"x of new rows is between 11 and 13, and s\(x\) was"):
        mean = effects.predict(run, {"x": [11.0, 12.0, 13.0]}, None).mean
    assert float(mean[2] - mean[1]) == pytest.approx(float(mean[1] - mean[0]), rel=1e-6)
