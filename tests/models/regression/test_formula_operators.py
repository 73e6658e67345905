"""Formulas mean what they say: nothing is dropped, and transforms of polynomials are those of R."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

import pyrofl
from pyrofl import effects, federations
from pyrofl.data.frames import Tables


def tables() -> Tables:
    rng, found = np.random.default_rng(5), {}
    for name in "ab":
        frame = pd.DataFrame({"x": rng.normal(size=20), "days": rng.integers(1, 60, 20) * 1.0})
        frame["n"] = rng.poisson(frame.days * 0.1)
        found[name] = frame.assign(g=list("uv") * 10)
    return federations.from_frames(found)


@pytest.mark.parametrize(
    ("right", "text"),
    [
        ("x %in% g", "unexpected '%'; expected + - * : or / between terms, such as x:g for x %in%"),
        ("x days", "unexpected 'days'"),
        ("x, days", "unexpected ','"),
        ("x // days", "unexpected '//'"),
        ("x\ndays", "unexpected 'days'"),
        ("x + (x days | g)", "unexpected 'days'"),
        ("days + x ** 2", "expected {x ** 2} for the power"),
        ("(days + (x ** 2))", "expected {x ** 2} for the power"),
        ("x +", "expected a term after the last '+'"),
    ],
)
def test_what_formulae_would_drop_is_refused(right: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(text)}[^\n]*$"):
        pyrofl.regression(f"n ~ {right}", tables())


def test_powers_of_sums_are_interactions() -> None:
    terms = pyrofl.regression("n ~ (x + days) ** 2", tables()).design.terms
    assert terms == ["x", "days", "x:days"]


@pytest.mark.parametrize("inner", ["poly(x, 2)", "bs(x, df=4)"])
def test_each_column_of_a_polynomial_or_spline_is_scaled(inner: str) -> None:
    data = tables()
    plain, scaled = (
        np.concatenate([*map(made.population.evaluate, made.clients.frames.values())])
        for made in (pyrofl.regression(f"n ~ {t}", data).design for t in (inner, f"scale({inner})"))
    )
    expected = (plain - plain.mean(0)) / plain.std(0)
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=1e-10)


def test_conditional_effects_stay_within_the_range_of_the_rows() -> None:
    data = tables()
    formula = "n ~ x + offset(np.log(days))"
    run = pyrofl.fit(pyrofl.regression(formula, data, family="poisson"), data, progress=False)
    days = np.concatenate([frame.days for frame in data.frames.values()])
    assert days.mean() - 2 * days.std() < 0
    table = effects.conditional(run, "days", points=5, draws=50)
    low, high = days.min(), min(days.max(), days.mean() + 2 * days.std())
    np.testing.assert_allclose(table["days"], np.linspace(low, high, 5))
    ratio = table["mean"] / table["days"]  # the offset is the logarithm of days
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
    for call in (
        lambda: effects.conditional(run, "days", at={"days": [-1.0]}),
        lambda: run.predict({"x": [0.0], "days": [-1.0]}, None),
    ):
        with pytest.raises(ValueError, match=r"offsets is not a finite number in the new row days"):
            call()
