"""Units and codes in arrays with named columns, and in clients that join a run."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd

from pyrofl import Federation


def sites(factor=1.0, **columns):
    rng = np.random.default_rng(3)
    found = {}
    for name, n in (("Bern", 40), ("Genf", 12), ("Lyon", 25)):
        x = pd.DataFrame({"creatinine": rng.lognormal(0, 0.4, n), "age": rng.normal(60, 9, n)})
        x["creatinine"] *= factor if name == "Lyon" else 1
        y = pd.Series(rng.normal(size=n), name="y")
        found[name] = (x.assign(**{c: change(x, y) for c, change in columns.items()}), y)
    return found


def told(found):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Federation.from_arrays(found)
    return [str(one.message) for one in caught]


def test_named_columns_of_arrays_are_checked():
    assert told(sites()) == []
    (units,) = told(sites(88.42))
    assert units.startswith("column creatinine: the numbers in Lyon are about")
    (codes,) = told(sites(age=lambda x, y: x["age"].where(np.arange(len(x)) % 5 > 0, 999.0)))
    assert "column age holds 999 in" in codes
    (answer,) = told(sites(late=lambda x, y: 2 * y + 1))
    assert "column late determines the target y" in answer
    twice = {n: (pd.concat([x, x]), pd.concat([y, y])) for n, (x, y) in sites().items()}
    assert any("nearly all rows of Bern, Genf, Lyon occur twice" in text for text in told(twice))


def test_arrays_without_names_are_taken_as_they_are():
    plain = {name: (x.to_numpy(), y.to_numpy()) for name, (x, y) in sites(88.42).items()}
    assert told(plain) == []
