"""Measured calibration of the methods: how often their 95% intervals contain the truth.

The table calibration.csv has the results of two simulations, of a linear model and of networks;
examples/CALIBRATION.md describes them. `python examples/numbers/make.py` writes it.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("calibration.csv")
LINEAR, NETWORKS = "linear", "networks"  # simulations


class MeasuredCoverage(NamedTuple):
    """Coverage of a method's 95% intervals in a simulation, in percent.

    Attributes:
        simulation: "linear" or "networks".
        method: name of the method.
        setting: its settings in the simulation; "" for the defaults.
        percent: how often the intervals contain the truth.
        calibrated: whether the coverage agrees with 95%, and ranks of the truth are uniform;
            False for networks, where this is not tested.
    """

    simulation: str
    method: str
    setting: str
    percent: int
    calibrated: bool


@lru_cache
def intervals(simulation: str) -> tuple[MeasuredCoverage, ...]:
    """Return the results of a simulation for all measured methods."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["simulation"] == simulation]
    return tuple(
        MeasuredCoverage(
            simulation, r["method"], r["setting"], int(r["percent"]), r["calibrated"] == "yes"
        )
        for r in rows
    )


def results_of_method(method: str, simulation: str) -> list[MeasuredCoverage]:
    """Return the results of a simulation for one method."""
    return [one for one in intervals(simulation) if one.method == method]


def sentence(method: str) -> str:
    """Return a sentence on the measured coverage of a method's intervals; "" if not measured."""
    words = []
    for holds, kind in ((True, "calibrated"), (False, "not calibrated")):
        some = [
            f"{one.percent}%{f' ({one.setting})' if one.setting else ''}"
            for one in results_of_method(method, LINEAR)
            if one.calibrated == holds
        ]
        words += [f"{kind}: {', '.join(some)}"] if some else []
    parts = [f"in the simulation of a small linear model {'; '.join(words)}"] if words else []
    parts += [f"in that of networks {one.percent}%" for one in results_of_method(method, NETWORKS)]
    return f"How often 95% intervals contain the truth: {'; '.join(parts)}." if parts else ""


def summary(method: str) -> str:
    """Return the coverage of a method's 95% intervals in a few words; "" if not measured.

    >>> summary("fedavg"), summary("fedhb").partition(" (linear model)")[0]
    ('', '95% intervals contain 96% of truths')
    """
    parts = []
    for simulation, model in ((LINEAR, "linear model"), (NETWORKS, "networks")):
        percentages = [one.percent for one in results_of_method(method, simulation)]
        low, high = (min(percentages), max(percentages)) if percentages else (0, 0)
        several = f"{low} to {high}%" if low < high else f"{high}%"
        parts += [f"{several} of truths ({model})"] if percentages else []
    return f"95% intervals contain {', '.join(parts)}" if parts else ""
