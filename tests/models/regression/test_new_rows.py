"""Predictions of rows with impossible values, and of names that programs and results use."""

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("formulae")

import pyrofl
from pyrofl import effects, federations


def frames():
    """Return rows of three clients."""
    random, tables = np.random.default_rng(5), {}
    for name, n in {"a": 25, "b": 4, "c": 30}.items():
        x = random.normal(size=n)
        y = 1 + x + random.normal(size=n)
        tables[name] = pd.DataFrame({"x": x, "y": y, "n": 9, "se": 1.0})
        tables[name]["events"] = random.binomial(9, 0.5, n)
        tables[name]["count"] = random.poisson(1 + (x > 0))
        tables[name]["ward"] = random.choice(["p", "q", "r"], n)
    return tables


def fitted(formula, change=lambda frame: frame, **how):
    tables = federations.from_frames({n: change(frame) for n, frame in frames().items()})
    method = pyrofl.regression(formula, tables, **how)
    return pyrofl.fit(method, tables, rounds=2, progress=False)


@pytest.fixture(scope="module")
def binomial():
    return fitted("events | trials(n) ~ x", family="binomial")


@pytest.fixture(scope="module")
def known_errors():
    return fitted("y | se(se) ~ x")


@pytest.mark.parametrize(
    ("run", "row", "text"),
    [
        ("binomial", {"n": -1}, "new rows: n is -1 in row 2; expected whole numbers of trials"),
        ("binomial", {"n": 2.5}, "new rows: n is 2.5 in row 2; expected whole numbers of trials"),
        ("known_errors", {"se": -1.0}, "new rows: se is -1 in row 2; expected standard errors"),
        ("known_errors", {"se": 0.0}, "new rows: se is 0 in row 2; expected standard errors"),
    ],
)
@pytest.mark.parametrize("call", ["predict", "row_draws"])
def test_impossible_trials_and_errors_of_new_rows_are_refused(run, row, text, call, request):
    run = request.getfixturevalue(run)
    rows = pd.DataFrame({"x": [0.0, 0.0], "n": [3, 3], "se": [1.0, 1.0]})
    rows = rows.assign(**{name: [rows[name][0], value] for name, value in row.items()})
    with pytest.raises(ValueError, match=text):
        run.predict(rows, "a") if call == "predict" else effects.row_draws(run, rows, "a")


def test_expected_responses_of_a_quantile_regression_are_means():
    run = fitted({"y": "y ~ x", "quantile": 0.8}, family="asym_laplace")
    predictions = effects.row_draws(run, draws=1000)["predictions"]
    sigma = run.to_arviz(1000, progress=False)["posterior"]["sigma"].values[0][:, None]
    # Of the density with quantile q: mean = location + sigma (1 - 2 q) / (q (1 - q)).
    expected = predictions["linpred"].values[0] + sigma * (1 - 2 * 0.8) / (0.8 * 0.2)
    np.testing.assert_allclose(predictions["epred"].values[0], expected, rtol=1e-5)
    at_zero = run.predict({"x": [0.0]}, "a").mean.item()
    table = effects.marginal(run, "x", [0.0, 1.0])
    assert abs(table.loc["x = 0.0", "mean"] - at_zero) < 0.1 * table.loc["x = 0.0", "sd"]


# The scale of three clients has a heavy tail: over seeds, Pareto k of its sd is about .7.
@pytest.mark.filterwarnings("ignore:estimates of corrected draws .* for the sd of")
def test_rates_below_zero_are_refused_where_counts_are_drawn():
    run = fitted("count ~ x + (1 | client)", family="poisson", link="identity")
    with pytest.raises(ValueError, match=r"count of row 2 is negative in .+% of the draws"):
        run.predict({"x": [0.0, -6.0]}, "a")
    with pytest.raises(ValueError, match="use link 'log'"):
        effects.row_draws(run, {"x": [-6.0]}, "a")
    with pytest.raises(ValueError, match="use link 'log'"):
        effects.conditional(run, "x", at={"x": -6.0})
    assert run.predict({"x": [2.0]}, "c").mean.item() > 0


@pytest.mark.parametrize("name", ["linpred", "epred", "draw", "row"])
def test_draws_of_a_response_that_has_the_name_of_an_axis(name):
    run = fitted(f"{name} ~ x", lambda frame: frame.rename(columns={"y": name}))
    predictions = effects.row_draws(run, draws=50)["predictions"]
    assert set(predictions.data_vars) == {"linpred", "epred", "response"}
    assert predictions["response"].shape == (1, 50, 59)


@pytest.mark.parametrize(
    ("formula", "old", "new", "text"),
    [
        ("y ~ Intercept + (Intercept || client)", "x", "Intercept", "has the name Intercept"),
        ("y ~ x + (1 | Intercept)", "ward", "Intercept", "has the name Intercept"),
        (
            {"y": "y ~ x + (1 | sigma_client)", "sigma": "~ (1 | client)"},
            "ward",
            "sigma_client",
            "two group terms have the name sigma_client",
        ),
        (
            "y ~ x + (1 | client/ward) + (1 | client_ward)",
            "n",
            "client_ward",
            "two group terms have the name client_ward",
        ),
    ],
)
def test_names_that_are_used_twice_are_refused(formula, old, new, text):
    data = {n: f.rename(columns={old: new}) for n, f in frames().items()}
    if old == "n":
        data = {n: f.assign(client_ward=f["ward"]) for n, f in data.items()}
    with pytest.raises(ValueError, match=text):
        pyrofl.regression(formula, federations.from_frames(data))
