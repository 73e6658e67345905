"""Personal models that never trained are said to be initial ones, by all methods."""

from __future__ import annotations

import prior_table as table
import pytest
import torch

import pyrofl
from pyrofl.inference.engine import participation
from pyrofl.inference.fitted_run.run import Run

PERSONAL = [m for m in table.BUILDS if "personal" in table.make(m).views]
FAST = ("ditto", "local", "fedavg", "pfedvem", "fedamp")


def one_of_three(method: str) -> Run:
    """Fit one round in which one of three clients trains, unless the method trains all."""
    draw = participation.fixed(1)
    return pyrofl.fit(table.make(method), table.data(), 1, participation=draw, progress=False)


@pytest.mark.parametrize(
    "method", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in PERSONAL]
)
def test_models_that_never_trained_are_named(method: str) -> None:
    run = one_of_three(method)
    names = {run.data.names[i] for i in (~run.state.seen).nonzero().flatten().tolist()}
    keeps = bool(run.state.client_states) or any(
        torch.is_tensor(v) and n in ("model", "affinity") for n, v in run.state.server.items()
    )
    scores = run.evaluate(model="personal")
    assert {*scores.untrained} == (names if keeps else set())
    warned = [text for text in run.warnings if "has not trained" in text]
    assert bool(warned) == bool(scores.untrained and not run.method.adapt)
    for text in warned:
        assert f"of {len(names)} of 3 clients has not trained, so that it is the initial" in text
        assert all(name in text for name in names)
        assert "; fit more rounds, or evaluate with adaptation='train'" in text
    assert run.evaluate(model="personal", adaptation="train").untrained == ()


def test_nobody_is_named_once_all_have_trained() -> None:
    run = pyrofl.fit(table.make("ditto"), table.data(), 2, progress=False)
    assert run.evaluate(model="personal").untrained == ()
    assert run.evaluate(model="global").untrained == ()
    assert run.warnings == []


def test_clients_without_a_model_of_their_own_are_not_named() -> None:
    for method in ("fedavg", "perfedavg"):
        run = one_of_three(method)
        assert all(run.evaluate(model=view).untrained == () for view in run.method.views)
        assert run.warnings == []
