"""Reptile: FedAvg with a rate of the server, and its relative in MetaVD."""

from __future__ import annotations

import pytest
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedavg, fedavgm, metavd, reptile
from pyrofl.nets import build
from pyrofl.tensors import role

PROMISES = {"reptile": Promises(message=(toys.ALL, toys.ALL))}


def test_the_server_goes_part_of_the_way_to_the_mean(tiny):
    method = reptile.build(build("mlp:5", (4,), 3), server_lr=0.3)
    old = first(method, tiny, 0).server
    state = last(method, tiny, 1)
    for n, value in state.message.items():
        mean = (3 * value[0] + 5 * value[1] + 4 * value[2]) / 12
        close(state.server[n], old[n] + 0.3 * (mean - old[n]))


def test_all_the_way_without_momentum_it_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    options = {"batch": 2, "fine_tune": 2, "lr": 0.1}
    one, plain = reptile.build(net, server_lr=1.0, **options), fedavg.build(net, **options)
    a, b = last(one, tiny, 3), last(plain, tiny, 3)
    for n, value in b.server.items():
        close(a.server[n], value)
    scores = [
        evaluate(m, tiny, s, adaptation="fine_tune").mean("nll") for m, s in ((one, a), (plain, b))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)


def test_with_momentum_it_is_fedavgm(tiny):
    net = build("mlp:5", (4,), 3)
    rates = {"server_lr": 0.4, "server_momentum": 0.9, "lr": 0.1}
    a, b = (last(module.build(net, **rates), tiny, 3) for module in (reptile, fedavgm))
    toys.assert_same(a.server, b.server)


def test_it_is_what_metavd_leaves_without_dropout():
    net, data = toys.net(), toys.blobs((6, 9, 20))
    one = reptile.build(
        net, server_lr=0.7, server_momentum=0.9, momentum=0.0, lr=0.05, epochs=2, batch=4
    )
    rates = {"server_lr": 0.7, "momentum": 0.9, "lr": 0.05, "clip": 1e9}
    other = metavd.build(net, on="reptile", dropout="none", epochs=2, batch=4, **rates)
    a, b = last(one, data, 3), last(other, data, 3)
    toys.assert_same(role("w", a.server), role("loc", b.server), atol=1e-10)


def test_it_is_tested_after_an_epoch_of_each_client(tiny):
    method = reptile.build(build("mlp:5", (4,), 3))
    assert [phase.epochs for phase in method.adapt] == [1]
    assert method.main_view == "personal"
    state = last(method, tiny, 3)
    tuned = evaluate(method, tiny, state, adaptation="fine_tune").mean("nll")
    assert tuned < evaluate(method, tiny, state, adaptation="none").mean("nll")
