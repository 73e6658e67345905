"""Rates of warnings about units in simulated federations, with and without another unit.

Percent of 400 federations of 2 to 12 clients of 3 to 60 rows (seed 52), by ratio of the units:

    weight                      79    98    98    98    98    98
    height                      87    98    98    98    98    98
    creatinine                   9    98    98    98    98    98
    triglycerides                0    52    86    97    98    98
    CRP                          0     8    28    61    87    98
    drug level, 30% zeros        2    84    95    98    98    98
    base excess, both signs      0    44    78    94    96    97
    ratio                      2.2    10    18    39    88 1,000

and without another unit, where hospitals differ: 0.8 on average, 7 for hospitals of children and of
adults, and for a number of each hospital that varies by 2% from row to row.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyrofl.data.tables.column_summary import summarize_values
from pyrofl.data.tables.units import unit_warning

RNG = np.random.default_rng
RATIOS = (2.2046, 10, 18, 38.67, 88.42, 1000)
SHIFT = 0.4  # SD of the clients' locations, in standard deviations within clients


def lognormal(spread):
    return lambda rng, n, z: rng.lognormal(SHIFT * spread * z, spread, n)


QUANTITIES = {
    "weight": lambda rng, n, z: np.maximum(rng.normal(75 + 15 * SHIFT * z, 15, n), 2),
    "height": lambda rng, n, z: rng.normal(170 + 8 * SHIFT * z, 8, n),
    "creatinine": lognormal(0.4),
    "triglycerides": lognormal(0.8),
    "CRP": lognormal(1.2),
    "drug level": lambda rng, n, z: lognormal(0.6)(rng, n, z) * (rng.random(n) < 0.7),
    "base excess": lambda rng, n, z: rng.normal(SHIFT * z, 1, n),
}
"""Quantity -> numbers of a client of n rows, whose location is z standard deviations from 0."""


def children_or_adults(rng, n, z):
    many = rng.normal(8, 4, n).clip(0, 18) if z > 0.7 else rng.normal(60, 15, n).clip(18, 95)
    return many.round()


HOSPITALS = {
    "normal": lambda rng, n, z: rng.normal(z, 1, n),
    "locations": lambda rng, n, z: rng.normal(50 + 8 * z, 10, n),
    "scales": lambda rng, n, z: rng.normal(50, 10 * np.exp(0.5 * z), n),
    "scales around 0": lambda rng, n, z: rng.normal(0, np.exp(0.6 * z), n),
    "skewed": lambda rng, n, z: rng.lognormal(0.4 * z, 1, n),
    "costs": lambda rng, n, z: rng.lognormal(7 + 0.5 * z, 0.9, n),
    "counts": lambda rng, n, z: rng.poisson(rng.gamma(2.0, 5.0), n),
    "rare counts": lambda rng, n, z: rng.poisson(rng.gamma(2.0, 0.5), n),
    "overdispersed counts": lambda rng, n, z: rng.poisson(rng.gamma(1.0, np.exp(1 + 0.6 * z), n)),
    "binary": lambda rng, n, z: 1.0 * (rng.random(n) < rng.random()),
    "rare binary": lambda rng, n, z: 1.0 * (rng.random(n) < 0.03),
    "one number": lambda rng, n, z: np.full(n, rng.uniform(10, 2000)),
    "beds by year": lambda rng, n, z: rng.uniform(100, 1200) * rng.normal(1, 0.02, n),
    "row numbers": lambda rng, n, z: np.arange(1.0, n + 1),
    "ids": lambda rng, n, z: rng.integers(0, 5) * 10_000 + np.arange(1.0, n + 1),
    "years": lambda rng, n, z: rng.integers(2005, 2021, n),
    "dates": lambda rng, n, z: 20_200_000.0 + rng.integers(101, 1231, n),
    "days": lambda rng, n, z: rng.uniform(0, 365 * np.exp(0.5 * z), n).round(),
    "children or adults": children_or_adults,
    "grades": lambda rng, n, z: rng.integers(1, 6, n),
    "zeros": lambda rng, n, z: rng.lognormal(0.5 * z, 0.8, n) * (rng.random(n) < rng.random()),
    "proportions": lambda rng, n, z: rng.beta(np.exp(z), 3, n),
}


def federation(rng, numbers, ratio=1.0):
    """Return the summaries of 2 to 12 clients, of which up to half have another unit."""
    count = int(rng.integers(2, 13))
    rows = rng.lognormal(3, 0.8, count).clip(3, 60).astype(int)
    odd = {*rng.permutation(count)[: rng.integers(1, count // 2 + 1)].tolist()}
    clients = {}
    for j in range(count):
        values = numbers(rng, rows[j], rng.normal()) * (ratio if j in odd else 1)
        clients[f"client {j}"] = summarize_values(np.asarray(values, float))
    return clients


def share(numbers, ratio=1.0, times=400):
    rng = RNG(52)
    return np.mean([bool(unit_warning("c", federation(rng, numbers, ratio))) for _ in range(times)])


@pytest.mark.parametrize("name", QUANTITIES)
def test_other_units_are_found(name):
    least = {
        "weight": (0.5, 0.9, 0.9),
        "height": (0.7, 0.9, 0.9),
        "creatinine": (0.0, 0.9, 0.9),
        "triglycerides": (0.0, 0.5, 0.9),
        "CRP": (0.0, 0.0, 0.7),
        "drug level": (0.0, 0.7, 0.9),
        "base excess": (0.0, 0.2, 0.8),
    }[name]
    found = [share(QUANTITIES[name], ratio, 60) for ratio in (2.2046, 10, 88.42)]
    assert all(one >= low for one, low in zip(found, least, strict=True)), found


def test_hospitals_that_truly_differ_are_hardly_ever_named():
    found = {name: share(numbers, times=60) for name, numbers in HOSPITALS.items()}
    assert np.mean([*found.values()]) <= 0.015
    hard = {"beds by year", "children or adults"}
    assert {name for name, one in found.items() if one > (0.12 if name in hard else 0.05)} == set()


def test_creatinine_in_other_units_is_named_with_few_rows():
    rng = RNG(1)
    usual = {
        name: summarize_values(rng.lognormal(0.1, 0.35, n))
        for name, n in (("Bern", 9), ("Genf", 40))
    }
    other = summarize_values(88.42 * rng.lognormal(0.1, 0.35, 6))
    told = unit_warning("creatinine", {**usual, "Lyon": other})
    assert "the numbers in Lyon are about" in told
    assert "larger than those in" in told
    assert unit_warning("creatinine", usual) == ""
    assert unit_warning("creatinine", {"Bern": usual["Bern"]}) == ""


def test_half_of_the_clients_may_have_another_unit():
    rng = RNG(2)
    clients = {
        f"{k}": summarize_values(rng.normal(5.5, 1, 30) * (18 if k < 4 else 1)) for k in range(8)
    }
    assert "the numbers in" in unit_warning("glucose", clients)


if __name__ == "__main__":
    for name, numbers in QUANTITIES.items():
        print(f"{name:24}", *(f"{100 * share(numbers, ratio):5.0f}" for ratio in RATIOS))
    alarms = {name: 100 * share(numbers) for name, numbers in HOSPITALS.items()}
    print(alarms, np.mean([*alarms.values()]))
