"""Paired intervals by other roads, and temperatures that are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t, ttest_rel

from pyrofl.paired import Interval, calibrate, interval, interval_over_seeds


def test_the_interval_is_that_of_scipy():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=(2, 23))
    found = ttest_rel(one, other)
    low, high = found.confidence_interval(0.95)
    mine = interval(one - other)
    assert np.allclose([mine.mean, mine.low, mine.high], [(one - other).mean(), low, high])


def test_right_or_wrong_has_two_more_rows():
    better, worse, count = 7, 2, 30
    d = np.repeat([1, -1, 0], [better, worse, count - better - worse])
    b, c, n = better + 0.5, worse + 0.5, count + 2  # Agresti and Min's table
    middle, error = (b - c) / n, np.sqrt(b + c - (b - c) ** 2 / n) / n
    half = t.ppf(0.975, count - 1) * error
    found = interval(d, binary=True)
    expected = [5 / 30, middle - half, middle + half]
    assert np.allclose([found.mean, found.low, found.high], expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_that_all_agree_cannot_tell(rows):
    assert interval(np.ones(rows), binary=True).verdict == "inconclusive"
    assert interval(np.zeros(rows), binary=True).verdict == "inconclusive"


def test_one_number_has_no_interval():
    assert interval(np.array([2.0])).verdict == "inconclusive"
    assert np.isnan(interval(np.array([])).mean)


def test_equal_models_differ_by_chance_no_more_than_said():
    rng, times = np.random.default_rng(1), 4000
    for rows in (6, 30):
        draws = rng.choice([-1, 0, 1], p=[0.2, 0.6, 0.2], size=(times, rows))
        wrong = np.mean([interval(d, binary=True).verdict != "inconclusive" for d in draws])
        assert wrong < 0.05 + 3 * np.sqrt(0.05 * 0.95 / times)


def test_intervals_of_few_rows_stay_in_the_possible_range():
    for d in ([1, 1], [1, -1], [-1, 0, -1]):
        found = interval(np.array(d), binary=True)
        assert -1 <= found.low <= found.mean <= found.high <= 1


def test_intervals_of_few_seeds_stay_in_the_possible_range():
    score, base = np.array([0.8646, 0.7234]), np.array([0.905, 0.905])
    assert interval(score - base).low == pytest.approx(-1.008, abs=1e-3)
    found = interval_over_seeds(score, base, 0.0, 1.0)
    # The base is 0.905 for both seeds, so no difference is below -0.905 or above 0.095.
    assert [found.mean, found.low, found.high] == pytest.approx([-0.111, -0.905, 0.095])
    base = np.array([0.90, 0.91])  # its interval is 0.905 +- 12.706 * 0.005
    found = interval_over_seeds(score, base, 0.0, 1.0)
    assert [found.low, found.high] == pytest.approx([-0.9685, 0.1585], abs=1e-4)
    error = interval_over_seeds(np.array([2.0, 9.0]), np.array([1.0, 1.0]), 0.0)
    assert error.low == -1.0  # an error is never below 0
    assert error.high == interval(np.array([1.0, 8.0])).high
    assert np.isnan(interval_over_seeds(score[:1], base[:1], 0.0, 1.0).low)  # one seed


def test_the_cut_loses_no_coverage():
    """Continuous accuracies near 1, two and three seeds: 95% up to 3 standard errors."""
    rng, times = np.random.default_rng(4), 2000
    for seeds in (2, 3):
        base, score = rng.normal((0.9, 0.99), (0.02, 0.003), size=(times, seeds, 2)).T
        cut = [interval_over_seeds(a, b, 0.0, 1.0) for a, b in zip(score.T, base.T, strict=True)]
        whole = [interval(a - b) for a, b in zip(score.T, base.T, strict=True)]
        assert any(one.high < other.high for one, other in zip(cut, whole, strict=True))
        missed = np.mean([not one.low <= 0.09 <= one.high for one in cut])
        assert missed < 0.05 + 3 * np.sqrt(0.05 * 0.95 / times)


def test_verdicts():
    ends = {(0.1, 0.2): "better", (-0.2, -0.1): "worse", (-0.1, 0.2): "inconclusive"}
    for (low, high), said in ends.items():
        assert Interval((low + high) / 2, low, high).verdict == said


def test_a_temperature_is_found_again():
    rng, rows, truth = np.random.default_rng(2), 8000, 2.0
    logits = rng.normal(size=(rows, 3)) * 1.5
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (rng.random((rows, 1)) > probs.cumsum(1)).sum(1)
    sure = np.exp(truth * logits)  # too sure: every logit is doubled
    found = calibrate(sure / sure.sum(1, keepdims=True), y)
    # The Fisher information of log T at T = 2, of logits z and their law p: the mean variance of z.
    mean = (probs * logits).sum(1, keepdims=True)
    information = rows * (probs * (logits - mean) ** 2).sum(1).mean()
    assert abs(np.log(found.temperature / truth)) < 4 / np.sqrt(information)
    assert found.ece[1] < found.ece[0] / 3
    assert found.nll[1] < found.nll[0]


def test_no_row_fits_itself():
    probs = np.full((40, 2), 0.5) + np.linspace(-0.1, 0.1, 40)[:, None] * [1, -1]
    y = np.random.default_rng(3).integers(0, 2, 40)  # nothing to learn
    found = calibrate(probs, y)
    assert found.nll[1] > np.log(2) - 0.02


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="3 rows; expected 4"):
        calibrate(np.full((3, 2), 0.5), np.zeros(3, int))
