"""The embedded natural groups are the published tables."""

from __future__ import annotations

import pytest
import torch

from pyrofl.data.loaders.datasets import load
from pyrofl.partitions.federations import split


def test_batters_are_tested_on_the_rest_of_the_season():
    data = load("baseball")
    federation = split(data, "groups")
    assert federation.clients == 18
    clemente = federation.names.index("Clemente")
    (train,), (test,) = federation.train[clemente], federation.test[clemente]
    assert (data.y[train], data.x[train, 0]) == (18, 45)
    # The season of 1970: 145 hits in 412 at-bats, .352.
    season = [float(v[train] + v[test]) for v in (data.y, data.x[:, 0])]
    assert season == [145, 412]
    first = data.y[~data.is_test] / 45
    assert float(first.mean()) == pytest.approx(0.265, abs=5e-4)  # Efron and Morris: .265
    assert data.likelihood == "binomial"


def test_rats():
    data = load("rat_tumours")
    assert split(data, "groups").clients == 71
    assert not data.is_test.any()
    assert (data.y[-1], data.x[-1, 0]) == (4, 14)  # the current experiment
    # Gelman et al., Bayesian Data Analysis, 5.1: mean .136 and sd .103 of the 70 earlier rates.
    rates = data.y[:70] / data.x[:70, 0]
    assert float(rates.mean()) == pytest.approx(0.136, abs=5e-4)
    assert float(rates.std(correction=0)) == pytest.approx(0.103, abs=5e-4)


@pytest.mark.parametrize("name", ["eight_schools", "baseball", "rat_tumours"])
def test_they_do_not_depend_on_the_seed(name):
    first, other = load(name), load(name, seed=5)
    assert torch.equal(first.y, other.y)
    assert first.groups.keys() == first.group_names.keys()
    with pytest.raises(ValueError, match=r"test_fraction is 0\.5; expected none"):
        load(name, test_fraction=0.5)
