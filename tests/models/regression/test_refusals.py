"""Formulas, columns and priors that are refused in one line, and names that must not clash."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations


def tables(**columns):
    random = np.random.default_rng(0)
    frames = {}
    for name, n in (("A", 7), ("B", 5), ("C", 9)):
        frame = pd.DataFrame({"x": random.normal(size=n), "y": random.normal(size=n)})
        frame["k"], frame["n"] = random.integers(0, 9, n), 10.0
        frame["g"] = np.resize(["a", "b"], n)
        for column, value in columns.items():
            frame[column] = value(n) if callable(value) else value
        frames[name] = frame
    return federations.from_frames(frames)


REFUSED = {
    "no predictors": ("y ~", {}, "expected predictors after '~'"),
    "a subtracted group": ("y ~ x - (1 | client)", {}, "'+' before group terms"),
    "columns of one name": ("y ~ I((x + k) * 2) + I(x + k * 2)", {}, "two columns named"),
    "a logarithm of 0": (
        "y ~ np.log(z)",
        {"z": 0.0},
        "A: np.log(z) is not a finite number in row 1",
    ),
    "a square that overflows": ("y ~ x", {"x": 1e200}, "expected finite numbers below 1e+100"),
    "a response that overflows": ("y ~ x", {"y": 1e200}, "response y is 1e+200 in row"),
    "numbers whose squares are 0": (
        "y ~ x",
        {"x": 1e-300},
        "x is at most 1e-300; expected numbers of at",
    ),
    "responses whose squares are 0": (
        "y ~ x",
        {"y": 1e-300},
        "response y is at most 1e-300; expected",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_formulas_and_columns_are_refused_in_one_line(name):
    formula, columns, told = REFUSED[name]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        pyrofl.regression(formula, tables(**columns))
    assert told in str(caught.value)


def test_trials_are_whole_numbers():
    with pytest.raises(ValueError, match=r"A: n is 10.5 in row 1; expected whole numbers"):
        pyrofl.regression("p(k, n) ~ x", tables(n=10.5), family="binomial")


def test_a_column_named_offset_or_trials_is_a_predictor_like_any_other():
    """The design and the posterior's program must not depend on the names of columns."""
    for name in ("offset", "trials", "event", "eta"):
        frames = {k: f.rename(columns={"x": name}) for k, f in tables().frames.items()}
        renamed = federations.from_frames(frames)
        formula = f"p(k, n) ~ {name} + offset(y)"
        one = pyrofl.regression("p(k, n) ~ x + offset(y)", tables(), family="binomial")
        other = pyrofl.regression(formula, renamed, family="binomial")
        body = [m.program().partition('"""\n    x, y')[2] for m in (one, other)]
        assert body[0] == body[1] != ""
        assert (one.design.federation().x == other.design.federation().x).all()


def test_a_response_may_have_the_name_of_a_parameter():
    frames = {k: f.rename(columns={"y": "sigma"}) for k, f in tables().frames.items()}
    method = pyrofl.regression("sigma ~ x", federations.from_frames(frames))
    assert 'pyro.sample("sigma_response"' in method.program()


def test_equal_responses_are_warned_of():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyrofl.regression("y ~ x", tables(y=1.0))
    assert any("all responses are 1" in str(one.message) for one in caught)
