"""Ditto: between training alone and the common model, which its own models do not touch."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import ditto, fedavg, fedprox, likelihoods, local
from pyrofl.nets import build

PROMISES = {"ditto": Promises(message=(toys.ALL, toys.ALL))}

PRODUCT = torch.tensor([0.3895, 1.3263], dtype=torch.float64)  # minimum of the pooled loss


def solved(pull: float, steps: int = 80) -> Method:
    """Build Ditto on two rows per client, with enough steps to solve each client's problem."""
    return ditto.build(
        build("linear", (2,), 1),
        strength=pull / 2,  # the loss is a mean over two rows
        likelihood=likelihoods.normal(),
        epochs=steps,
        batch=None,
        lr=2 / (4 + pull),
        momentum=0.0,
    )


def test_the_own_model_is_the_map_around_the_received_one(quadratic):
    state = last(solved(1.0), quadratic.federation, 1, server_state={"w/w": PRODUCT})
    expected, _ = quadratic.posterior(PRODUCT, torch.ones(2))
    close(expected[0], (0.8779, 0.6632), 5e-5)
    close(state.client_states["own/w/w"], expected, 1e-8)


@pytest.mark.parametrize("pull", [0.0, 1e6])
def test_the_ends_are_training_alone_and_the_received_model(quadratic, pull):
    state = last(solved(pull), quadratic.federation, 1, server_state={"w/w": PRODUCT})
    end = PRODUCT.expand(2, 2) if pull else quadratic.mean
    close(state.client_states["own/w/w"], end, 1e-4)


def test_without_pull_it_is_local_beside_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    both = last(ditto.build(net, strength=0.0, batch=2), tiny, 3)
    alone = last(local.build(net, batch=2), tiny, 3)
    common = last(fedavg.build(net, batch=2), tiny, 3)
    for n, value in common.server.items():
        assert torch.equal(both.server[n], value)
        assert torch.equal(both.client_states[f"own/{n}"], alone.client_states[n])


@pytest.mark.parametrize("strength", [0.5, 4.0])
def test_whatever_the_pull_the_common_model_is_fedavgs(tiny, strength):
    net = build("mlp:5", (4,), 3)
    both = last(ditto.build(net, strength=strength, lr=0.05), tiny, 3)
    common = last(fedavg.build(net, lr=0.05), tiny, 3)
    for n, value in common.server.items():
        assert torch.equal(both.server[n], value)


def test_what_it_keeps_in_round_one_is_what_fedprox_sends(tiny):
    net = build("mlp:5", (4,), 3)
    kept = last(ditto.build(net, strength=0.7, batch=2), tiny, 1).client_states
    sent = last(fedprox.build(net, mu=0.7, batch=2), tiny, 1).message
    for n, value in sent.items():
        assert torch.equal(kept[f"own/{n}"], value)


def test_a_stronger_pull_ends_nearer_to_the_common_model(tiny):
    net = build("mlp:5", (4,), 3)

    def distance(strength: float) -> float:
        state = last(ditto.build(net, strength=strength, lr=0.02, batch=None), tiny, 3)
        start = last(fedavg.build(net, lr=0.02, batch=None), tiny, 2).server
        return sum(float((state.client_states[f"own/{n}"] - v).norm()) for n, v in start.items())

    found = [distance(s) for s in (0.0, 1.0, 10.0)]
    assert found[0] > found[1] > found[2] > 0


def test_own_models_go_on_from_where_they_were(tiny):
    net = build("mlp:5", (4,), 3)
    method = ditto.build(net, own_epochs=0)
    begun = first(method, tiny, 0)
    state = last(method, tiny, 2)
    for n, value in begun.server.items():
        close(state.client_states[f"own/{n}"], value.expand(3, *value.shape))
        assert not torch.equal(state.server[n], value)


def test_who_comes_later_starts_at_what_it_receives(tiny):
    method = ditto.build(build("mlp:5", (4,), 3))
    state = last(method, tiny, 1, participation=fixed(1))
    stranger = torch.tensor([int((~state.seen).nonzero()[0])])
    _, private = client_inputs(method, tiny, state, tiny.cohort(stranger), seed=0)
    for n, value in state.server.items():
        assert torch.equal(private[f"own/{n}"][0], value)


def test_the_views_are_the_own_and_the_common_model(tiny):
    net = build("mlp:5", (4,), 3)
    method = ditto.build(net, lr=0.1)
    state = last(method, tiny, 3)
    found = evaluate(method, tiny, state, model="global").mean("nll")
    plain = fedavg.build(net, lr=0.1)
    assert found == evaluate(plain, tiny, last(plain, tiny, 3), model="global").mean("nll")
    assert evaluate(method, tiny, state).mean("nll") != found
    tuned = ditto.build(net, lr=0.1, fine_tune=5)
    better = evaluate(tuned, tiny, state, adaptation="fine_tune").mean("nll")
    assert better < evaluate(tuned, tiny, state).mean("nll")
