"""The core runs without the parts around it, and imports none of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import toys

import pyrofl
from pyrofl import extensions
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.engine.round import LocalClients
from pyrofl.inference.training.phases import run_phases
from pyrofl.models import fedabml, fedavg, metavd, pfedmb, pfedvem


@pytest.fixture
def bare(monkeypatch):
    """Register nothing."""
    monkeypatch.setattr(extensions, "_function_paths", {})
    monkeypatch.setattr(extensions, "_functions", {})


SLOW = [pytest.param(paper, marks=pytest.mark.slow) for paper in (fedabml, metavd, pfedmb)]


@pytest.mark.parametrize("paper", [fedavg, pfedvem, *SLOW])
def test_rounds_without_extensions_have_the_same_results(blobs, monkeypatch, paper):
    known = toys.last(paper.build(toys.net()), blobs, 3)
    with monkeypatch.context() as bare:
        bare.setattr(extensions, "_function_paths", {})
        bare.setattr(extensions, "_functions", {})
        state = toys.last(paper.build(toys.net()), blobs, 3)
    for name, value in known.server.items():
        torch.testing.assert_close(state.server[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("bare")
def test_arguments_of_removed_parts_are_refused(blobs):
    method, privacy = fedavg.build(toys.net()), pyrofl.Privacy(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"privacy needs .*, a part of pyrofl that was removed"):
        pyrofl.fit(method, blobs, 1, privacy=privacy)
    with pytest.raises(ValueError, match=r"engine='ray' needs .*, a part of pyrofl that was remo"):
        pyrofl.fit(method, blobs, 1, engine="ray")


def test_an_executor_of_the_user_runs_every_phase(blobs, monkeypatch):
    calls = []

    def counting(training, *arguments):
        calls.append(training.record)
        return run_phases(training, *arguments)

    method = fedavg.build(toys.net())
    expected = toys.last(method, blobs, 2)
    monkeypatch.setitem(extensions._functions, "executor", counting)
    state = toys.last(method, blobs, 2, record=True, check=False)
    assert calls
    assert set(calls) == {True}
    toys.assert_same_round(state, expected, rtol=1e-9, atol=1e-9)


def test_a_backend_of_the_user_carries_every_request(blobs):
    requests = []

    def backend(request):
        requests.append(request.state.number)
        return LocalClients(blobs, request)

    method = fedavg.build(toys.net())
    toys.assert_same_round(
        toys.last(method, blobs, 3, engine=backend, check=False), toys.last(method, blobs, 3)
    )
    assert requests == [0, 1, 2]


class Emptied(LocalClients):
    """Clients with messages that lose their shapes if nobody in a chunk reports."""

    def replies(self):
        for reply in super().replies():
            if not len(reply.sender.ids):
                reply.message = {n: v.new_zeros(0) for n, v in reply.message.items()}
            yield reply


def test_a_chunk_without_messages_needs_no_shapes(blobs):
    method = replace(fedavg.build(toys.net()), metadata=Metadata(train_all_clients=True))
    options = {"participation": pyrofl.participation.fixed(2), "chunk_size": 1, "check": False}
    backend = partial(Emptied, blobs)
    state = toys.last(method, blobs, 2, engine=backend, **options)
    toys.assert_same_round(state, toys.last(method, blobs, 2, **options))


def test_an_unknown_engine_is_refused(blobs):
    method = fedavg.build(toys.net())
    with pytest.raises(ValueError, match="engine is 'rayy'; expected"):
        pyrofl.fit(method, blobs, 1, engine="rayy")


def test_an_extension_replaces_another_and_is_imported_when_it_is_needed(monkeypatch):
    monkeypatch.setattr(extensions, "_function_paths", {})
    monkeypatch.setattr(extensions, "_functions", {})
    assert extensions.find_extension("point") is None
    extensions.register({"point": "math:sqrt"})
    assert extensions.find_extension("point")(4.0) == 2.0
    with pytest.raises(ValueError, match="unknown extension point 'pointe'; did you mean point"):
        extensions.register({"pointe": "math:sqrt"})
    for place in ("math", "math.sqrt", "math:", ":sqrt", math.sqrt):
        with pytest.raises(
            ValueError, match=r"point is registered as .*; expected a string 'module:"
        ):
            extensions.register({"point": place})
    extensions.register({"point": "no_such_module:function"})
    with pytest.raises(ValueError, match="but there is no module 'no_such_module'"):
        extensions.find_extension("point")
    extensions.register({"point": "pyrofl.no_such_part.module:function"})
    assert extensions.find_extension("point") is None
    extensions.register({"point": "pyrofl.extensions:no_such_function"})
    with pytest.raises(AttributeError, match="no_such_function"):
        extensions.find_extension("point")
