"""Edited tensors of a saved state are refused in one line, before any work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import ditto

METHOD = ditto.build(toys.net(), epochs=1)
DATA = toys.blobs((3, 9, 7), dtype=torch.float32)
SERVER, OWN = "w/head.weight", "own/w/head.weight"


@cache
def begun() -> Run:
    return fit(METHOD, DATA, 1, progress=False)


def server(edit: Callable[[Tensor], Any]) -> RoundState:
    state = begun().state
    return replace(state, server={**state.server, SERVER: edit(state.server[SERVER])})


def states(edit: Callable[[Tensor], Any]) -> RoundState:
    state = begun().state
    edited = {**state.client_states, OWN: edit(state.client_states[OWN].clone())}
    return replace(state, client_states=edited)


def with_value(at: tuple[int, ...], number: float) -> Callable[[Tensor], Tensor]:
    def edit(value: Tensor) -> Tensor:
        edited = value.clone()
        edited[at] = number
        return edited

    return edit


def without(tensors: Any, name: str) -> dict[str, Tensor]:
    return {n: v for n, v in tensors.items() if n != name}


def edited() -> dict[str, RoundState]:
    state = begun().state
    shape = list(state.server[SERVER].shape)
    tensor = f"'{SERVER}' is torch"
    own = f"client_states of 'client 0': '{OWN}' is torch"
    size = f"expected torch.float32 {shape}, as returned by init"
    extra = {"foo": torch.ones(3, 2)}
    unseen = torch.tensor([True, False, True])
    return {
        f"server: {tensor}.float32 {[1, *shape[1:]]}; {size}": server(lambda v: v[:1]),
        f"server: {tensor}.float64 {shape}; {size}": server(Tensor.double),
        f"server: {tensor}.int64 {shape}; {size}": server(Tensor.long),
        f"server lacks '{SERVER}'; {size}": replace(state, server=without(state.server, SERVER)),
        "server has 'foo', which the method does not have; expected w/": replace(
            state, server={**state.server, **extra}
        ),
        f"server: '{SERVER}' is nan at [1, 0]; expected finite": server(
            with_value((1, 0), torch.nan)
        ),
        f"server holds '{SERVER}', a ndarray; expected tensors": server(Tensor.numpy),
        "server is a list; expected a dict of tensors": replace(state, server=[1]),
        f"{own}.float32 {[1, *shape[1:]]}; {size}_client": states(lambda v: v[:, :1]),
        f"{own}.float64 {shape}; {size}_client": states(Tensor.double),
        f"{own}.int64 {shape}; {size}_client": states(Tensor.long),
        f"client_states holds '{OWN}' of shape {[2, *shape]}; expected [3, ...]": states(
            lambda v: v[:2]
        ),
        f"client_states of 'client 0' lacks '{OWN}'; {size}_client": replace(
            state, client_states=without(state.client_states, OWN)
        ),
        "client_states of 'client 0' lacks 'own/w/": replace(state, client_states={}),
        "client_states of 'client 0' has 'foo', which the method does not have": replace(
            state, client_states={**state.client_states, **extra}
        ),
        f"client_states of 'client 2': '{OWN}' is inf at [1, 0]; expected finite": states(
            with_value((2, 1, 0), torch.inf)
        ),
        "client_states of 'client 1': 'own/w/": replace(states(lambda v: v), seen=unseen),
        " is a round of 2 clients, but the data have 3": replace(state, seen=state.seen[:2]),
        "seen is torch.int64; expected a tensor of bools": replace(state, seen=state.seen.long()),
        "seen is a list; expected a tensor of bools": replace(state, seen=[True] * 3),
        "seen has shape [3, 1]; expected a tensor of bools": replace(
            state, seen=state.seen[:, None]
        ),
        "number is -1; expected an integer >= 0": replace(state, number=-1),
        "number is 1.0; expected an integer >= 0": replace(state, number=1.0),
        "rows is a list; expected a tensor of whole numbers, [3, 2]": replace(state, rows=[1]),
        "rows has shape [2, 2]; expected": replace(state, rows=state.rows[:2]),
        "message is a NoneType; expected a dict of tensors": replace(state, message=None),
    }


@pytest.mark.parametrize("told", edited())
def test_an_edited_state_is_refused_before_any_work(told):
    state = edited()[told]
    run = begun().copy()
    run.state = state
    for resume in (
        lambda: federate(METHOD, DATA, 2, resume_from=state),
        lambda: fit(METHOD, DATA, 2, resume_from=state, progress=False),
        lambda: fit(METHOD, DATA, 2, resume_from=run, progress=False),
    ):
        full = re.escape(f"resume_from{'' if told[0] == ' ' else '.'}{told}")
        with pytest.raises(ValueError, match=full) as caught:
            resume()
        assert "\n" not in str(caught.value)


def test_the_state_of_another_method_is_refused():
    other = ditto.build(toys.net("mlp:4"), epochs=1)
    with pytest.raises(ValueError, match=r"resume_from\.server: 'w/.* is torch"):
        federate(other, DATA, 2, resume_from=begun().state)


def test_values_may_be_edited_and_the_precision_may_change():
    halved = server(lambda v: v / 2)
    assert [s.number for s in federate(METHOD, DATA, 2, resume_from=halved)] == [2]
    double = DATA.to("cpu", torch.float64)
    (state,) = federate(METHOD, double, 2, resume_from=begun().state)
    assert {v.dtype for v in state.server.values()} == {torch.float64}
