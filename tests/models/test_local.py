"""Local: clients that train alone from one common start."""

from __future__ import annotations

import pytest
import torch
from checks import close
from promises import Promises
from toys import last

from pyrofl.data import Federation
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.state import client_inputs
from pyrofl.models import fedavg, local
from pyrofl.nets import build

PROMISES = {"local": Promises(message=(0, 0))}


def test_nothing_travels(tiny):
    state = last(local.build(build("mlp:5", (4,), 3)), tiny, 2)
    assert state.server == state.message == {}
    assert not state.bytes_up.any()
    assert not state.bytes_down.any()


def test_clients_and_fedavg_start_from_the_same_network(tiny):
    net = build("mlp:5", (4,), 3)
    options = {"lr": 0.0, "batch": None}
    alone = last(local.build(net, **options), tiny, 1, seed=3)
    together = last(fedavg.build(net, **options), tiny, 1, seed=3)
    for n, value in alone.client_states.items():
        close(value, together.server[n].expand_as(value))


def test_one_client_alone_is_fedavg(tiny):
    alone = Federation(tiny.x, tiny.y, tiny.train[1:2], tiny.test[1:2])
    net = build("mlp:5", (4,), 3)
    one = last(local.build(net, batch=2), alone, 3)
    other = last(fedavg.build(net, batch=2), alone, 3)
    for n, value in one.client_states.items():
        assert torch.equal(value[0], other.server[n])


def test_there_is_nothing_to_merge():
    with pytest.raises(ValueError, match="aggregation is 'median'; expected none"):
        local.build(build("softmax", (4,), 3), aggregation="median")


def test_everybody_trains_whoever_reports(tiny):
    method = local.build(build("mlp:5", (4,), 3))
    few = last(method, tiny, 2, participation=fixed(1))
    all_ = last(method, tiny, 2)
    assert few.trained.tolist() == [0, 1, 2]
    for n, value in few.client_states.items():
        assert torch.equal(value, all_.client_states[n])


def test_the_personal_model_is_the_clients_own(tiny):
    method = local.build(build("mlp:5", (4,), 3))
    state = last(method, tiny, 1)
    received, private = client_inputs(method, tiny, state, tiny.cohort(torch.arange(3)), seed=0)
    assert set(method.views) == {"personal"}
    for n, value in method.views["personal"](received, private | received).items():
        assert torch.equal(value, state.client_states[n])
