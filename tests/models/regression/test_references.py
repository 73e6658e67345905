"""Coefficients of regressions agree with estimates of statsmodels and lifelines.

The priors are weak compared with 360 rows: posterior means differ from maximum likelihood by the
skewness of the posterior, and its standard deviations are the standard errors.
"""

import json
import warnings
from pathlib import Path

import pytest

pytest.importorskip("formulae")

from promises import others_slow
from regression_problems import PROBLEMS, frames

import pyrofl
from pyrofl import federations
from pyrofl.models.regression.effects import coefficient_draws
from pyrofl.models.regression.prediction import posterior_draws

REFERENCES = json.loads(Path(__file__).with_name("references.json").read_text())["estimates"]
QUICK = ("gaussian, weights", "gaussian, offset", "poisson, offset", "poisson, weights")
SHIFT, RATIO = 0.15, 0.07  # in standard errors, and of standard deviations
SKEWED = {("zero inflated", "Intercept"): (0.2, 0.2)}  # as few zeros are inflated


@pytest.mark.parametrize("name", others_slow(PROBLEMS, QUICK))
def test_coefficients_are_those_of_maximum_likelihood(name):
    formula, how = PROBLEMS[name]
    tables = federations.from_frames(frames())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = pyrofl.regression(formula, tables, **how)
        run = pyrofl.fit(method, tables, progress=False)
        drawn = coefficient_draws(method, posterior_draws(run, 4000))
    assert {*drawn} >= {*REFERENCES[name]}
    for term, (estimate, error) in REFERENCES[name].items():
        shift, ratio = SKEWED.get((name, term), (SHIFT, RATIO))
        assert float(drawn[term].mean()) == pytest.approx(estimate, abs=shift * error), term
        assert float(drawn[term].std()) == pytest.approx(error, rel=ratio), term


def test_every_family_has_a_reference_here_or_in_another_test():
    from pyrofl.models.regression.families import FAMILIES

    known = {how.get("family", "gaussian") for _, how in PROBLEMS.values()}
    assert {*REFERENCES} == {*PROBLEMS}
    assert {*FAMILIES} - known == {
        "student",
        "zero_inflated_negative_binomial",
        "hurdle_negative_binomial",
        "hurdle_gamma",
        # Those of test_distributions.py:
        "skew_normal",
        "asym_laplace",
        "beta_binomial",
        "zero_one_inflated_beta",
        # Those of the page of known data sets, compared with NumPyro:
        "sratio",
        "acat",
    }
