"""Clients that send what they add to sums: the same method, and who cannot do so."""

from __future__ import annotations

import pytest
import test_contract as contract
import torch
import toys
from promises import others_slow
from sites import CLOSE, SIZES

from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.privacy.sums import summed
from pyrofl.models import fedabml, fedavg, guides
from pyrofl.models.priors import learned_scales

DATA = toys.blobs(SIZES)
POOLED = [n for n in contract.METHODS if isinstance(contract.built(n).aggregate, Aggregator)]


def three(method: Method, **options: object) -> list[dict[str, torch.Tensor]]:
    """Return the server's states of three rounds in which some clients report."""
    draw = bernoulli(0.7)
    states = federate(method, DATA, 3, participation=draw, seed=5, **options)  # type: ignore[arg-type]
    return [state.server for state in states]


def assert_near(found: Method, expected: Method, **options: object) -> None:
    for a, b in zip(three(found, **options), three(expected), strict=True):
        toys.assert_same(a, b, rtol=1e-7, atol=1e-10)  # clients train from what is rounded


@pytest.mark.parametrize("name", others_slow(POOLED))
def test_sums_are_all_that_a_server_needs(name):
    method = contract.built(name)
    if method.upload and next(federate(method, DATA, 1)).message:
        assert_near(summed(method), method)


def test_sums_may_be_folded():
    method = contract.built("pfedvem")
    assert_near(summed(method), method, chunk_size=2, keep_messages=False)


def test_sums_about_what_a_client_has_received():
    """Second moments about the server's mean, and scales that are learned beside a method."""
    moments = fedabml.build(toys.net(), average="moments")
    assert_near(summed(moments), moments)
    scaled = fedavg.build(toys.net(), prior=learned_scales.learned(), guide=guides.mean_field)
    scaled = learned_scales.learning(scaled, toys.net().shapes)
    assert_near(summed(scaled), scaled)


def test_clients_send_weights_and_weighted_changes():
    plain = next(federate(contract.built("pfedvem"), DATA, 1, seed=5))
    sent = next(federate(summed(contract.built("pfedvem")), DATA, 1, seed=5)).message
    assert {n.partition("/")[0] for n in sent} == {"sum", "weight"}
    toys.assert_same({"": sent["weight/0"]}, {"": plain.message["tau"]})
    toys.assert_same({"": sent["weight/1"]}, {"": DATA.sizes.double()})
    start = contract.first(contract.built("pfedvem"), DATA, 5).server
    change = plain.message["mean/head.bias"] - start["loc/head.bias"]
    expected = plain.message["tau"][:, None] * change
    toys.assert_same({"": sent["sum/loc/head.bias"]}, {"": expected}, **CLOSE)


@pytest.mark.parametrize("name", ["pvi", "metavd", "fedbe"])
def test_a_server_that_needs_messages_apart_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=f"^{name}: aggregation is not a weighted mean, so .* message; "
    ):
        summed(contract.built(name))


def test_robust_merges_are_refused():
    with pytest.raises(
        ValueError, match=r"^fedavg: aggregation is 'median', so its server .* message; use"
    ):
        summed(fedavg.build(toys.net(), aggregation="median"))
