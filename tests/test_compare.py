"""`pyrofl.compare`: the table of the command, from Python."""

from __future__ import annotations

import numpy as np
import pytest

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.experiments.comparison import Comparison
from pyrofl.models import fedavg, local, pfedvem


@pytest.fixture(scope="module")
def data() -> pyrofl.Federation:
    """Five ragged clients with few classes each."""
    return federations.split(datasets.load("digits"), "slices:2", 5)


@pytest.fixture(scope="module")
def found(data) -> Comparison:
    """Two methods with two seeds."""
    net = nets.build("softmax", (64,), 10)
    methods = {"alone": local.build(net), "averaged": fedavg.build(net)}
    return pyrofl.compare(methods, data, 2, seeds=[3, 7], progress=False)


def test_runs_are_those_of_fit(found, data):
    alone = pyrofl.fit(found.runs["averaged"][1].method, data, 2, seed=7, progress=False)
    table = found.to_dataframe().set_index(["method", "seed", "model", "metric"])["value"]
    expected = alone.evaluate().mean("accuracy")
    assert table["averaged", 7, "global", "accuracy"] == pytest.approx(expected)


def test_the_table_has_means_errors_and_differences(found):
    frame = found.to_dataframe()
    rows = frame[(frame["metric"] == "accuracy") & (frame["adaptation"] == "none")]
    each = rows.groupby(["method", "model"])["value"]
    means, errors = each.mean(), each.std(ddof=1) / np.sqrt(2)
    text = repr(found)
    for key, mean in means.items():
        assert f"{mean:.4f} ± {errors[key]:.4f}" in text
    assert "accuracy minus *" in text
    assert "not converged" in text
    best = means.idxmax()[0]
    (line,) = (line for line in text.splitlines() if line.startswith(best) and "*" in line)
    assert f"{means.max():.4f}" in line


def test_methods_have_names(data):
    net = nets.build("softmax", (64,), 10)
    found = pyrofl.compare([local.build(net)], data, 1, seeds=1, progress=False)
    assert [*found.runs] == ["local"]
    assert "One seed" not in repr(found)  # there is nothing to compare
    with pytest.raises(ValueError, match="several methods are named fedavg; pass a dict"):
        pyrofl.compare([fedavg.build(net), fedavg.build(net, lr=0.1)], data, 1)
    with pytest.raises(ValueError, match="methods is empty"):
        pyrofl.compare({}, data, 1)
    with pytest.raises(ValueError, match="did you mean seeds"):
        pyrofl.compare([pfedvem.build(net)], data, 1, sedes=2)
