"""All methods give what they gave before the code was reorganized, within rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden import redesign
from promises import ARCHETYPES, others_slow

from pyrofl.experiments.methods import builds
from pyrofl.models import fedavg

comparable = pytest.mark.skipif(
    not redesign.is_comparable(), reason="this processor rounds the first weights differently"
)


def test_methods_have_numbers():
    covered = {name.partition(":")[0] for name in redesign.read()}
    assert len(covered & builds().keys()) >= 36  # a newer method need not have any
    assert redesign.read().keys() - {redesign.STARTS} == redesign.cases().keys()


@comparable
def test_a_small_change_of_a_setting_is_noticed():
    case = redesign.cases()["fedavg"]
    kept = redesign.read()["fedavg"]
    assert not redesign.differences(redesign.measure(case), kept)

    def build(data):
        return fedavg.build(redesign.toys.net(), lr=0.01 * (1 + 1e-8), **redesign.SOME)

    found = redesign.differences(redesign.measure(replace(case, build=build)), kept)
    assert any("server" in line for line in found)


def test_one_changed_element_of_a_large_tensor_is_noticed():
    value = np.random.default_rng(0).standard_normal((3, 40))
    other = value.copy()
    other[2, 7] += 1e-8
    one, two = ({"w": redesign.fingerprint(v)} for v in (value, other))
    assert not redesign.differences(one, one)
    assert redesign.differences(one, two)
    other[2, 7] = np.nan
    assert redesign.differences(one, {"w": redesign.fingerprint(other)})


@comparable
@pytest.mark.parametrize(
    "name", others_slow(redesign.cases(), (*ARCHETYPES, "pfedvem: stragglers"))
)
def test_results_are_as_before(name):
    found = redesign.measure(redesign.cases()[name])
    rtol = redesign.LARGER_RTOL.get(name, redesign.RTOL)
    assert not redesign.differences(found, redesign.read()[name], rtol)


@comparable
@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize("name", ARCHETYPES)
def test_chunk_sizes_give_the_same(name, chunk_size):
    case = redesign.cases()[name]
    found = redesign.measure(replace(case, how={**case.how, "chunk_size": chunk_size}))
    assert not redesign.differences(found, redesign.read()[name])
