"""Two sets of draws beside each other, in a few numbers with their Monte Carlo errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from pyrofl.inference.posteriors.export import import_arviz

FAR, RATIOS = 0.1, (0.9, 1.1)  # a row is bad beyond
ENERGY = 1500  # draws that distances are taken of
QUANTILES = (0.025, 0.5, 0.975)

Draws = Mapping[str, np.ndarray]


class Worst(NamedTuple):
    """A number, where it is found, and its standard error."""

    value: float
    at: str
    error: float


def labelled(draws: Draws, names: Sequence[str], lead: int) -> dict[str, np.ndarray]:
    """Return every coordinate [*lead] of some sites by its label, such as w[3,0]."""
    found = {}
    for name in names:
        for at in np.ndindex(draws[name].shape[lead:]):
            label = f"{name}[{','.join(map(str, at))}]" if at else name
            found[label] = draws[name][(..., *at)]
    return found


def summary(draws: np.ndarray) -> dict[str, Any]:
    """Describe a coordinate's draws [chain, draw]."""
    az = import_arviz()
    flat = draws.ravel()
    centred = (flat - flat.mean()) / flat.std()
    effective = {how: float(az.ess(draws, method=how)) for how in ("bulk", "mean", "sd")}
    return {
        "mean": float(flat.mean()),
        "sd": float(flat.std()),
        "quantiles": [float(v) for v in np.quantile(flat, QUANTILES)],
        "kurtosis": float((centred**4).mean()),
        "ess": effective,
    }


def in_short(draws: Draws, names: Sequence[str]) -> dict[str, list[float]]:
    """Return label -> mean, sd, standard error of the mean in sds, 2.5%, 50% and 97.5%."""
    found = {}
    for label, values in labelled(draws, names, 2).items():
        one = summary(values)
        numbers = (one["mean"], one["sd"], one["ess"]["mean"] ** -0.5, *one["quantiles"])
        found[label] = [float(f"{v:.4g}") for v in numbers]
    return found


def beside(
    found: Draws,
    known: Draws,
    population: Sequence[str],
    own: Sequence[str],
    resampled: float = math.inf,
) -> dict[str, Worst]:
    """Compare draws [S, *p] with those of a reference [chain, draw, *p].

    Args:
        found: independent draws.
        known: of the reference.
        population: shared sites.
        own: sites of clients.
        resampled: effective draws that those of the reference were drawn from.

    Returns:
        name -> Worst: shift of a mean in reference sds, low and high ratio of sds, correlation (the
        largest difference, of the population alone), energy (of the population, 0 to 1).
    """
    names = (*population, *own)
    mine, other = labelled(found, names, 1), labelled(known, names, 2)
    told = {label: summary(v) for label, v in other.items()}
    shifts, ratios = [], []
    for label, draws in mine.items():
        one, n = told[label], len(draws)
        error = math.sqrt(1 / one["ess"]["mean"] + 1 / resampled + 1 / n)
        shifts.append(Worst((draws.mean() - one["mean"]) / one["sd"], label, error))
        ratio = draws.std() / one["sd"]
        fourth = math.sqrt((one["kurtosis"] - 1) / 4)
        error = ratio * fourth * math.sqrt(1 / one["ess"]["sd"] + 1 / resampled + 1 / n)
        ratios.append(Worst(ratio, label, error))
    labels = [label for label in mine if label.partition("[")[0] in population]
    x = np.stack([mine[label] for label in labels], -1)
    y = np.stack([other[label].ravel() for label in labels], -1)
    least = min(told[label]["ess"]["bulk"] for label in told)
    error = math.sqrt(1 / least + 1 / resampled + 1 / len(x))
    return {
        "shift": max(shifts, key=lambda w: abs(w.value)),
        "low": min(ratios),
        "high": max(ratios),
        "correlation": _correlation(x, y, labels, error),
        "energy": _energy(x, y),
    }


def bad(row: Mapping[str, Any]) -> bool:
    """Say whether a mean is off by more than 0.1 sd, or a ratio of sds outside 0.9 to 1.1."""
    low, high = RATIOS
    return abs(row["shift"][0]) > FAR or row["low"][0] < low or row["high"][0] > high


def _correlation(x: np.ndarray, y: np.ndarray, labels: Sequence[str], error: float) -> Worst:
    """Return the largest difference of correlations of columns."""
    if len(labels) < 2:
        return Worst(0.0, "", error)
    off = np.triu(np.corrcoef(x.T) - np.corrcoef(y.T), 1)
    i, j = np.unravel_index(np.abs(off).argmax(), off.shape)
    return Worst(float(off[i, j]), f"{labels[i]}, {labels[j]}", error)


def _energy(x: np.ndarray, y: np.ndarray) -> Worst:
    """Return (2 E|X - Y| - E|X - X'| - E|Y - Y'|) / 2 E|X - Y|, in reference sds.

    Its error is what the two halves of the reference, turn by turn, are apart.
    """
    centre, unit = y.mean(0), y.std(0)
    x, y = ((v - centre) / unit for v in (_some(x), _some(y)))
    return Worst(_distance(x, y), "", abs(_distance(y[::2], y[1::2])))


def _some(draws: np.ndarray) -> np.ndarray:
    """Return draws that are far from each other in a chain."""
    return draws[np.linspace(0, len(draws) - 1, min(len(draws), ENERGY)).astype(int)]


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    between = cdist(x, y).mean()
    within = sum(cdist(v, v).sum() / (len(v) * (len(v) - 1)) for v in (x, y))
    return float((2 * between - within) / (2 * between))
