"""Paired comparisons of two models on the same rows, with confidence intervals.

Differences of rows are paired, so what makes a row hard for both cancels. The interval is
Student's, that of `scipy.stats.ttest_rel`. Where a score is 0 or 1, that interval is too narrow at
few rows, as all differences may be equal; there it is Agresti and Min's, with Student's quantile:
that of two more rows, half a row better, half a row worse, and one alike ("Simple improved
confidence intervals for comparing matched proportions", Statistics in Medicine 2005).

Student's interval of two or three differences is wide and may leave the range of the score, such as
accuracies from 0 to 1. It is cut to the differences that are possible, which loses no coverage as
long as scores vary over seeds: -1 to 1 for rows that are right or wrong, and for seeds the range
that `interval_over_seeds` gives.

And calibration: temperature scaling (Guo et al., "On Calibration of Modern Neural Networks", 2017),
p^(1/T) made to sum to 1, T by the likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from pyrofl.metrics import calibration_bins, calibration_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 0.95
MAX_TEMPERATURE = 100.0  # T is at most so much, and at least one over it


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its 95% interval; NaN for fewer than two differences."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "worse", "inconclusive"]:
        """Whether the confidence interval lies above 0 (better), below 0 (worse) or contains 0."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "inconclusive"


def interval(differences: NDArray[Any], binary: bool = False) -> Interval:
    """Return the mean of paired score differences [N] and its 95% confidence interval.

    If `binary`, the scores are 0 or 1.
    """
    from scipy.stats import t

    d = np.asarray(differences, dtype=float)
    count, mean = len(d), float(d.mean()) if len(d) else np.nan
    if count < 2:
        return Interval(mean, np.nan, np.nan)
    if binary:
        more = count + 2
        center, square = d.sum() / more, (np.square(d).sum() + 1) / more
        error = np.sqrt((square - center**2) / more)
    else:
        center, error = mean, d.std(ddof=1) / np.sqrt(count)
    half = t.ppf((1 + LEVEL) / 2, count - 1) * error
    low, high = float(center - half), float(center + half)
    return Interval(mean, max(low, -1.0), min(high, 1.0)) if binary else Interval(mean, low, high)


def interval_over_seeds(
    score: NDArray[Any], base: NDArray[Any], least: float = -np.inf, most: float = np.inf
) -> Interval:
    """Return the mean difference of two models' scores [S], paired by seed, and its interval.

    The interval is Student's, cut to the differences that are possible: both scores lie between
    `least` and `most`, and the mean of `base` lies in its own 95% interval. With accuracies and a
    base of 0.90 and 0.91, no difference is above 1 - 0.8415 = 0.1585. Its ends are NaN for fewer
    than two seeds.
    """
    interval_of_difference, of = interval(score - base), interval(base)
    if interval_of_difference.low != interval_of_difference.low:
        return interval_of_difference
    low = max(interval_of_difference.low, least - min(of.high, most))
    high = min(interval_of_difference.high, most - max(of.low, least))
    return Interval(interval_of_difference.mean, low, high)


@dataclass(frozen=True)
class Calibration:
    """Calibration errors of class probabilities before and after temperature scaling."""

    temperature: float  # geometric mean of those of both halves; above 1, the model was too sure
    ece: tuple[float, float]  # of the most probable class, before and after
    nll: tuple[float, float]  # in nats per row, likewise


def calibrate(probs: NDArray[Any], y: NDArray[Any]) -> Calibration:
    """Return calibration errors of probabilities [N, K] before and after temperature scaling."""
    if len(y) < 4:
        raise ValueError(f"there are {len(y)} rows; expected 4 at least, 2 in each half")
    logs = np.log(np.clip(probs, np.finfo(np.float32).tiny, 1.0))
    after, temperatures = np.empty_like(logs), []
    for half in (0, 1):
        held = np.arange(len(y)) % 2 == half
        temperatures.append(temperature(logs[~held], y[~held]))
        after[held] = tempered(logs[held], temperatures[-1])
    both = (tempered(logs, 1.0), after)
    ece, nll = [_ece(np.exp(one), y) for one in both], [_nll(one, y) for one in both]
    return Calibration(
        float(np.sqrt(temperatures[0] * temperatures[1])), (ece[0], ece[1]), (nll[0], nll[1])
    )


def temperature(logs: NDArray[Any], y: NDArray[Any]) -> float:
    """Return the softmax temperature that maximizes the likelihood of the labels y [N]."""
    from scipy.optimize import minimize_scalar

    def loss(cold: float) -> float:
        return _nll(tempered(logs, np.exp(cold)), y)

    ends = (-np.log(MAX_TEMPERATURE), np.log(MAX_TEMPERATURE))
    return float(np.exp(minimize_scalar(loss, bounds=ends, method="bounded").x))


def tempered(logs: NDArray[Any], temperature: float) -> NDArray[Any]:
    """Divide log probabilities [N, K] by a temperature and normalize them."""
    from scipy.special import log_softmax

    scaled: NDArray[Any] = log_softmax(logs / temperature, axis=-1)
    return scaled


def _nll(logs: NDArray[Any], y: NDArray[Any]) -> float:
    return float(-logs[np.arange(len(y)), y].mean())


def _ece(probs: NDArray[Any], y: NDArray[Any]) -> float:
    sure, right = (torch.from_numpy(v) for v in (probs.max(-1), probs.argmax(-1) == y))
    return float(calibration_error(calibration_bins(sure, right.to(sure)))[0])
