"""No method learns worse, or better, than in the release before without anybody's notice."""

from __future__ import annotations

import json
from statistics import mean

import pytest
from parity import released

KNOWN = json.loads(released.PATH.read_text())
WITHIN = 0.02  # of means over seeds: random streams may change, so may a row or two of each seed


def test_every_method_is_among_them():
    assert sorted(KNOWN) == released.methods()


@pytest.mark.slow
@pytest.mark.parametrize("name", released.methods())
def test_a_method_reaches_what_it_did(name):
    found = [released.accuracy(name, seed) for seed in released.SEEDS]
    assert mean(found) == pytest.approx(mean(KNOWN[name]), abs=WITHIN), (found, KNOWN[name])
