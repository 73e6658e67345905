"""Heads on what a base that stands still makes of all rows: the same steps, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
import torch
import toys
from checks import close

from pyrofl.data import Batch, Federation
from pyrofl.inference import fast
from pyrofl.inference.engine.round import meet
from pyrofl.inference.engine.rounds import first
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.inference.fast.frozen_base import FEATURES, on_frozen_base
from pyrofl.inference.federate import federate
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.models import fedavg, fedbabu, fedper, fedrep, guides, pfedvem
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors

NET = build("mlp:5", (4,), 3)
USUAL = {"batch": 2, "epochs": 2, "lr": 0.1}


def taken(method: Method, data: Federation, which: str = "phases") -> list[bool]:
    """Say of which phases the base's features are computed once."""
    who = data.who(torch.arange(data.clients))
    received, private = meet(method, data, first(method, data, 0), who, 0)
    return [
        on_frozen_base(method, phase, private | received, data) is not None
        for phase in getattr(method, which)
    ]


@pytest.fixture
def slowly(monkeypatch) -> Callable[[], None]:
    """Let phases run as they are written from now on."""
    return lambda: monkeypatch.setattr(fast, "REWRITES", ())


CASES = {
    "fedrep": lambda: fedrep.build(NET, fine_tune=2, **USUAL),
    "fedrep, parts exchanged": lambda: fedrep.build(NET, head="fc1.*", **USUAL),
    "fedbabu": lambda: fedbabu.build(NET, tune="head", **USUAL),
    "pfedvem": lambda: pfedvem.build(NET, batch=2, head_epochs=3, base_epochs=2, lr_head=0.01),
}


@pytest.mark.parametrize("name", CASES)
def test_features_of_a_frozen_base_change_nothing(name, tiny, slowly):
    method = CASES[name]()
    which = "adapt" if name == "fedbabu" else "phases"
    assert any(taken(method, tiny, which))
    who = tiny.who(torch.arange(3))

    def both() -> tuple[Tensors, Tensors]:
        state = toys.last(method, tiny, 2)
        _, tuned = prepared(method, tiny, state, who, adapted="adapt" if method.adapt else "phases")
        assert not isinstance(tuned, list)
        assert FEATURES not in state.private | tuned  # dropped once nobody needs them
        return state.server | dict(state.private), tuned

    quick = both()
    slowly()
    for found, expected in zip(quick, both(), strict=True):
        assert found.keys() == expected.keys()
        for n, v in expected.items():
            close(found[n], v)


def test_the_base_runs_once_over_all_rows(tiny, monkeypatch):
    rows: list[int] = []
    method = fedrep.build(NET, head_epochs=4, epochs=0, batch=2)
    below, _ = NET.split("head.*") or (None, None)
    assert below is not None
    run = Network.__call__

    def counted(self, weights, x):
        if list(self.shapes) == list(below.shapes):
            rows.append(x[..., 0].numel())
        return run(self, weights, x)

    monkeypatch.setattr(Network, "__call__", counted)
    toys.last(method, tiny, 1, check=False)
    assert sum(rows) == 3 * 5  # three clients, padded to the longest
    rows.clear()
    monkeypatch.setattr(fast, "REWRITES", ())
    toys.last(method, tiny, 1, check=False)
    assert not rows


def test_features_are_dropped_from_memory(tiny):
    method = fedrep.build(NET, **USUAL)
    who = tiny.who(torch.arange(3))
    received, private = meet(method, tiny, first(method, tiny, 0), who, 0)
    local = private | received
    (begin, _, end), most = on_frozen_base(method, method.phases[0], local, tiny) or ()
    assert most == inf
    (features,), (forget,) = begin.moves, end.moves
    assert callable(features)
    assert callable(forget)
    batch = tiny.batch(who.ids)
    made = features(received, local, batch)
    assert made[FEATURES].shape == (3, 5, 5)
    left = forget(received, local | made, batch)[FEATURES]
    assert left.numel() == left.untyped_storage().nbytes() == 0


def test_a_model_in_place_of_fedreps_trains_its_head_too(tiny):
    seen = []

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        seen.append(batch)
        method.model(received, local, batch)

    method = fedrep.build(NET, head_epochs=2, epochs=1, batch=None, lr=0.1)
    opaque = replace(method, model=model)
    assert taken(method, tiny) == [True, False]
    assert taken(opaque, tiny) == [False, False]
    state = toys.last(opaque, tiny, 1, check=False)
    assert len(seen) == 3
    for n, v in toys.last(method, tiny, 1).server.items():
        close(state.server[n], v)


def test_a_base_with_draws_does_not_stand_still(tiny):
    assert taken(fedrep.build(NET, guide=guides.mean_field), tiny) == [False, False]


def untold(method: Method) -> Method:
    """Hide the losses of a method's steps in plain functions."""

    def hidden(step: Step) -> Step:
        return replace(step, loss=lambda *args: step.loss(*args))

    return replace(
        method,
        phases=tuple(
            replace(p, moves=tuple(hidden(m) if isinstance(m, Step) else m for m in p.moves))
            for p in method.phases
        ),
    )


def nothing(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Move nothing, but who knows."""
    return {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: fedavg.build(NET),
        lambda: fedper.build(NET),
        lambda: fedbabu.build(NET),
        lambda: fedrep.build(NET, head_epochs=0),
        lambda: untold(fedrep.build(NET)),
        lambda: pfedvem.build(NET, head="*", scale=0.1),
    ],
    ids=["all", "all again", "base", "no epoch", "own loss", "no base"],
)
def test_where_the_steps_would_differ_it_is_not_done(make: Callable[[], Method], tiny):
    method = make()
    assert not any(taken(method, tiny))
    assert not next(federate(method, tiny, 1)).rejected


def test_a_move_beside_the_steps_sees_the_rows_themselves(tiny):
    method = fedrep.build(NET)
    head = method.phases[0]
    other = replace(method, phases=(replace(head, moves=(*head.moves, nothing)),))
    assert taken(other, tiny) == [False]
    assert isinstance(head, Phase)
