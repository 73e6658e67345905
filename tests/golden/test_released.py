"""From release to release every method reaches the same, or a change of the file says where not."""

from __future__ import annotations

import math

import pytest
from golden import released

QUICK = ("ditto", "fedavg", "metavd", "pfedmb", "pfedvem")  # seconds in all
MEANT = "; if that is meant: python tests/golden/released.py"


def test_the_file_has_every_method():
    names = {name for name, _ in released.kept()}
    assert names == set(released.builds()), "expected python tests/golden/released.py METHOD"


def test_quick_methods_reach_what_the_last_release_reached():
    found = {(name, 0): released.measure(name, 0) for name in QUICK}
    assert not (said := released.moved(found, released.kept())), f"{said}{MEANT}"


@pytest.mark.slow
def test_all_methods_reach_what_the_last_release_reached():
    found = {
        (n, seed): released.measure(n, seed) for n in released.builds() for seed in released.SEEDS
    }
    assert not (said := released.moved(found, released.kept())), f"{said}{MEANT}"


def test_it_names_the_method_that_moved():
    before = {("fedavg", 0): (0.5, 1.25), ("local", 0): (0.5, 1.0), ("pvi", 1): (0.5, 1.0)}
    after = {("fedavg", 0): (0.5, 1.26), ("local", 0): (0.5, 1.0 + 1e-12)}
    after |= {("pvi", 1): (0.5, math.nan), ("new", 0): (0.5, 1.0)}
    fedavg, new, pvi = released.moved(after, before)
    assert fedavg.startswith("fedavg, seed 0: accuracy 0.5000 -> 0.5000, NLL 1.25 -> 1.26")
    assert new == "new, seed 0: new"
    assert pvi.startswith("pvi, seed 1")
