"""Regressions that are saved and loaded predict bit for bit the same, and others are refused."""

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations

FORMULA = "y ~ center(x) + g + (1 | client/ward) + (1 | item)"
NEW = {"x": [0.3, 9.0], "g": ["no", "yes"], "ward": ["0", "new"], "item": ["a", "z"]}


def frames(shift=0.0):
    random = np.random.default_rng(0)
    found = {}
    for name, n in {"A": 5, "B": 12, "C": 8}.items():
        frame = pd.DataFrame({"x": random.normal(size=n) + shift})
        frame["g"] = [["no", "yes"][i % 2] for i in range(n)]
        frame["ward"] = [str(i % 2) for i in range(n)]
        frame["item"] = [["a", "b", "c"][i % 3] for i in range(n)]
        frame["y"] = np.exp(random.normal(size=n))
        found[name] = frame
    return found


def build(formula=FORMULA, family="gaussian", shift=0.0):
    tables = federations.from_frames(frames(shift))
    return pyrofl.regression(formula, tables, family=family), tables


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    method, tables = build()
    run = pyrofl.fit(method, tables, rounds=1, progress=False)
    folder = tmp_path_factory.mktemp("runs") / "ours"
    run.save(folder)
    return run, folder


# Effects of three items have heavy tails: Pareto k is above .7 in half of 24 seeds.
@pytest.mark.filterwarnings("ignore:estimates of corrected draws are unreliable")
def test_a_loaded_regression_predicts_the_same(saved):
    run, folder = saved
    method, tables = build()
    loaded = pyrofl.load(folder, method=method, data=tables)
    for client in ("B", None):
        one, other = (r.predict(NEW, client, draws=100) for r in (run, loaded))
        assert torch.equal(one.mean, other.mean)
        assert one.frame().equals(other.frame())
    assert run.summary(100).equals(loaded.summary(100))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (lambda: build(family="lognormal"), "another run"),
        (lambda: build("y ~ x + g + (1 | client/ward) + (1 | item)"), "another run"),
        (lambda: build(shift=1.0), "another run"),
    ],
)
def test_another_regression_is_refused(saved, method, text):
    made, tables = method()
    with pytest.raises(ValueError, match=text):
        pyrofl.load(saved[1], method=made, data=tables)


def test_a_regression_is_needed_to_load_one(saved):
    _, tables = build()
    with pytest.raises(ValueError, match="build the method as it was"):
        pyrofl.load(saved[1])
    with pytest.raises(ValueError, match="expected the regression of these tables"):
        pyrofl.load(saved[1], data=tables)


def test_a_prediction_beyond_the_training_rows_warns_at_its_line():
    method, tables = build("y ~ bs(x, df=4) + (1 | client)")
    run = pyrofl.fit(method, tables, rounds=1, progress=False)
    with pytest.warns(UserWarning, match="x of new rows is between") as seen:
        run.predict({"x": [0.0, 9.0]}, "B", draws=20)
    assert [one.filename for one in seen] == [__file__]


def test_no_priors_and_an_empty_dict_of_priors_are_the_same_regression(saved):
    _, folder = saved
    tables = federations.from_frames(frames())
    method = pyrofl.regression(FORMULA, tables, priors={})
    assert pyrofl.load(folder, method=method, data=tables).state.number == 1
