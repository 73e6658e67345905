"""Accuracy of posterior draws, compared with a reference, and its Monte Carlo errors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.spatial.distance import cdist

from pyrofl.inference.posteriors.export import import_arviz

MAX_SHIFT, RATIOS, MAX_ENERGY = 0.1, (0.9, 1.1), 0.01  # limits of accurate results
SURE = 2  # standard errors by which an inaccurate result exceeds them
ENERGY = 1000  # draws for the energy distance

Draws = Mapping[str, np.ndarray]


class Statistics(NamedTuple):
    """Mean and standard deviation of a coordinate, and their Monte Carlo standard errors."""

    mean: float
    sd: float
    mcse_mean: float
    mcse_sd: float


class Worst(NamedTuple):
    """Value of the worst coordinate, its label, and its standard error."""

    value: float
    at: str
    error: float


@dataclass(frozen=True)
class Reference:
    """Reference posterior.

    Attributes:
        made_by: how it was computed, see `references`.
        diagnostic: R-hat of chains, or Pareto k of importance weights.
        effective: number of effective draws, of chains or of importance weights; None for a grid.
        seconds: of a processor.
        statistics: of each coordinate, such as w[3,0].
        draws: of sites of the population, [S, *p].
    """

    made_by: str
    diagnostic: float
    effective: int | None
    seconds: float
    statistics: Mapping[str, Statistics]
    draws: Draws

    def save(self, folder: Path, name: str) -> None:
        """Write NAME.json, and NAME.npz if there are draws."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.draws:
            np.savez_compressed(folder / f"{name}.npz", **self.draws)
        facts = ("made_by", "diagnostic", "effective", "seconds")
        told = [f'"{n}": {json.dumps(getattr(self, n))}' for n in facts]
        each = (f'  "{n}": {json.dumps(v)}' for n, v in self.statistics.items())
        told += [f'"columns": {json.dumps(Statistics._fields)}']
        told += ['"statistics": {\n' + ",\n".join(each) + "\n}"]
        (folder / f"{name}.json").write_text("{\n" + ",\n".join(told) + "\n}\n")

    @classmethod
    def load(cls, folder: Path, name: str) -> Reference:
        """Read NAME.json, and NAME.npz if there is one."""
        path = folder / f"{name}.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; run references.py --problems {name}")
        told = json.loads(path.read_text())
        del told["columns"]
        told["statistics"] = {n: Statistics(*v) for n, v in told["statistics"].items()}
        if not path.with_suffix(".npz").exists():
            return cls(**told, draws={})
        with np.load(path.with_suffix(".npz")) as kept:
            return cls(**told, draws=dict(kept))


def labeled(draws: Draws, names: Sequence[str], lead: int) -> dict[str, np.ndarray]:
    """Return every coordinate [*lead] of some sites by its label, such as w[3,0]."""
    found = {}
    for name in names:
        for at in np.ndindex(draws[name].shape[lead:]):
            label = f"{name}[{','.join(map(str, at))}]" if at else name
            found[label] = draws[name][(..., *at)]
    return found


def statistics(
    draws: Draws, names: Sequence[str], resampled: float = math.inf
) -> dict[str, Statistics]:
    """Return the statistics of every coordinate.

    Args:
        draws: [chain, draw, *p].
        names: of the sites.
        resampled: effective number of draws that the draws were resampled from.
    """
    az, found = import_arviz(), {}
    for label, values in labeled(draws, names, 2).items():
        mean, sd = values.mean(), values.std()
        fourth = (((values - mean) / sd) ** 4).mean() if sd else 1.0
        of_mean, of_sd = (
            math.sqrt(1 / float(az.ess(values, method=how)) + 1 / resampled) if sd else 0.0
            for how in ("mean", "sd")
        )
        errors = (sd * of_mean, sd * of_sd * math.sqrt(max(fourth - 1, 0) / 4))
        digits = 4 - math.floor(math.log10(sd)) if sd else 9
        found[label] = Statistics(*(round(float(v), digits) for v in (mean, sd, *errors)))
    return found


def compare(found: Draws, known: Reference, population: Sequence[str]) -> dict[str, Worst]:
    """Compare draws with a reference.

    Args:
        found: draws [chain, draw, *p], of own sites [chain, draw, C, *p]; sites without reference
            are ignored.
        known: the reference.
        population: sites for the energy distance.

    Returns:
        "shift": largest difference of a mean, in standard deviations of the reference; "low" and
        "high": smallest and largest ratio of standard deviations; "energy": see `energy`, if there
        are sites for it.
    """
    shifts, ratios = [], []
    for label, one in statistics(found, list(found)).items():
        other = known.statistics[label]
        error = math.hypot(one.mcse_mean, other.mcse_mean) / other.sd
        shifts.append(Worst((one.mean - other.mean) / other.sd, label, error))
        error = math.hypot(one.mcse_sd, other.mcse_sd * one.sd / other.sd) / other.sd
        ratios.append(Worst(one.sd / other.sd, label, error))
    worst = {"shift": max(shifts, key=lambda w: abs(w.value))}
    worst |= {"low": min(ratios), "high": max(ratios)}
    if not population:
        return worst
    flat = {n: v.reshape(-1, *v.shape[2:]) for n, v in found.items() if n in population}
    return worst | {"energy": energy(*(_columns(v, population) for v in (flat, known.draws)))}


def accurate(worst: Mapping[str, Worst]) -> bool:
    """Return whether all limits hold, up to two Monte Carlo standard errors.

    Means are off by at most 0.1 standard deviations, ratios of standard deviations are 0.9 to 1.1,
    and the energy distance is at most 0.01.
    """
    shift, low, high = (worst[n] for n in ("shift", "low", "high"))
    far = worst.get("energy", Worst(0.0, "", 0.0))
    return bool(
        abs(shift.value) - SURE * shift.error <= MAX_SHIFT
        and low.value + SURE * low.error >= RATIOS[0]
        and high.value - SURE * high.error <= RATIOS[1]
        and far.value - SURE * far.error <= MAX_ENERGY
    )


def energy(x: np.ndarray, y: np.ndarray) -> Worst:
    """Return (2 E|X - Y| - E|X - X'| - E|Y - Y'|) / 2 E|X - Y|, between 0 and 1.

    Args:
        x: draws [S, d].
        y: draws of the reference, whose standard deviations are the units.

    Returns:
        The distance; its error is the distance between two halves of the reference.
    """
    center, unit = y.mean(0), y.std(0)
    x, y = ((v - center) / unit for v in (_thinned(x), _thinned(y)))
    return Worst(_distance(x, y), "", abs(_distance(y[::2], y[1::2])))


def _columns(draws: Draws, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([draws[n].reshape(len(draws[n]), -1) for n in names], 1)


def _thinned(draws: np.ndarray) -> np.ndarray:
    return draws[np.linspace(0, len(draws) - 1, min(len(draws), ENERGY)).astype(int)]


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    between = cdist(x, y).mean()
    within = sum(cdist(v, v).sum() / (len(v) * (len(v) - 1)) for v in (x, y))
    return float((2 * between - within) / (2 * between))
