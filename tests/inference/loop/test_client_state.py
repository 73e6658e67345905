"""Private state of many clients: one copy of it, in memory or on the disk."""

from __future__ import annotations

from dataclasses import replace

import faults
import pytest
import torch
import toys

from pyrofl.inference.loop import state as client_state
from pyrofl.inference.loop.one_copy import OneCopy
from pyrofl.inference.loop.participation import fixed
from pyrofl.inference.loop.rounds import advance, federate, first
from pyrofl.inference.loop.state import ClientState, mapped
from pyrofl.models import pfedvem
from pyrofl.tensors import Tensors


def runs(blobs, **what):
    method = pfedvem.build(toys.net(), draws=2, head_epochs=2, base_epochs=1)
    draw = fixed(5)
    return federate(method, blobs, 4, participation=draw, trains=draw, **what)


@pytest.mark.parametrize("memory", [None, 0])
def test_one_copy_holds_what_many_copies_hold(blobs, monkeypatch, memory):
    *_, many = runs(blobs)
    monkeypatch.setattr(client_state, "COPIED", 0)
    *_, one = runs(blobs, state_memory=memory)
    assert one.private.large
    assert not many.private.large
    toys.assert_same(many.private, one.private)
    toys.assert_same(many.server, one.server)


def test_state_that_a_later_round_has_overwritten_is_refused(blobs, monkeypatch):
    monkeypatch.setattr(client_state, "COPIED", 0)
    states = runs(blobs)
    first = next(states)
    tau = first.private["tau"].clone()
    assert (tau != 0).sum() == 5
    second = next(states)
    for ask in (
        lambda: first.private["tau"],
        lambda: list(first.private.values()),
        lambda: list(first.private.items()),
        lambda: first.private | {},
        lambda: {} | first.private,
        lambda: first.private.get("tau"),
        lambda: first.private.copy(),
        lambda: dict(first.private),
    ):
        with pytest.raises(ValueError, match="overwritten by a later one"):
            ask()
    assert (second.private["tau"] != 0).sum() > 5


def test_a_round_that_fails_on_its_way_takes_back_what_it_wrote(blobs, monkeypatch):
    monkeypatch.setattr(client_state, "COPIED", 0)
    method = pfedvem.build(toys.net(), draws=2, head_epochs=2, base_epochs=1)
    states = federate(method, blobs, 3, chunk=3)
    state = next(states)
    before = {n: v.clone() for n, v in state.private.items()}

    def fail(*_: object) -> Tensors:
        raise KeyboardInterrupt

    broken = replace(method, merge=fail)
    with pytest.raises(KeyboardInterrupt):
        next(federate(broken, blobs, 3, chunk=3, start=state))
    toys.assert_same(before, state.private)
    *_, resumed = federate(method, blobs, 3, chunk=3, start=state)
    *_, whole = federate(method, blobs, 3, chunk=3)
    toys.assert_same(whole.private, resumed.private)
    toys.assert_same(whole.server, resumed.server)


def test_a_round_in_which_nobody_keeps_anything_spoils_nothing():
    old = OneCopy({"a": torch.zeros(3)})
    assert ClientState(old, torch.zeros(3, dtype=torch.bool), None).close() is old
    assert not old.stale


def test_a_round_writes_into_the_tables_that_nobody_has_looked_at(blobs):
    def table(state):
        return dict.__getitem__(state.private, "tau")

    states, copies = [], []
    for state in runs(blobs):
        states.append(state)
        copies.append({n: v.clone() for n, v in dict.items(state.private)})
    # The one before the last is told apart when it is looked at, those before it were earlier.
    assert table(states[3]).data_ptr() == table(states[2]).data_ptr()
    assert table(states[1]).data_ptr() != table(states[3]).data_ptr()
    trained = states[3].trained
    kept = states[2].kept(torch.arange(12))
    toys.assert_same(kept, copies[2])
    assert any(bool((kept[n][trained] != copies[3][n][trained]).any()) for n in kept)
    for state, copy in zip(states, copies, strict=True):
        toys.assert_same(dict(state.private), copy)
    looked = [dict(state.private) and state for state in runs(blobs)]
    assert table(looked[3]).data_ptr() != table(looked[2]).data_ptr()
    for one, other in zip(states, looked, strict=True):
        toys.assert_same_round(one, other)


def test_two_runs_that_go_on_from_one_round_do_not_meet(blobs):
    method = pfedvem.build(toys.net(), draws=2, head_epochs=2, base_epochs=1)
    start = next(federate(method, blobs, 1, trains=fixed(5)))
    one = federate(method, blobs, 3, trains=fixed(5), start=start)
    other = federate(method, blobs, 3, trains=fixed(5), start=start)
    pairs = [(next(one), next(other)) for _ in range(2)]
    for a, b in pairs:
        toys.assert_same_round(a, b)


def test_a_mapped_tensor_is_zeros_that_can_be_written():
    value = mapped((3, 2), torch.float64)
    assert value.tolist() == [[0, 0]] * 3
    value[1] = 7
    assert value.sum() == 14
    assert mapped((0, 2), torch.float32).shape == (0, 2)


@pytest.mark.parametrize("copied", [0, client_state.COPIED])
def test_clients_whose_messages_are_left_out_in_the_end_keep_what_they_had(
    blobs, monkeypatch, copied
):
    monkeypatch.setattr(client_state, "COPIED", copied)
    method = pfedvem.build(toys.net(), draws=2, head_epochs=1, base_epochs=1)
    odd = faults.corrupted(method, faults.POISONS["wrong type"][0], 3, 8)
    ids = torch.arange(12)
    good = torch.tensor([i for i in range(12) if i not in (3, 8)])
    begun = advance(odd, blobs, first(method, blobs, 0), ids, ids, chunk=1)
    assert begun.who.ids.tolist() == good.tolist()
    assert not any(bool(v[[3, 8]].any()) for v in begun.private.values())
    whole = advance(
        faults.corrupted(method, faults.POISONS["NaN"][0]), blobs, begun, ids, ids, chunk=1
    )
    before = {n: v.clone() for n, v in whole.private.items()}
    unknown = replace(whole, message={})  # no form is known from an earlier round
    after = advance(odd, blobs, unknown, ids, ids, chunk=1)
    assert len(after.rejected) == 2
    toys.assert_same(
        {n: v[[3, 8]] for n, v in after.private.items()}, {n: v[[3, 8]] for n, v in before.items()}
    )
    assert any(bool((after.private[n][good] != v[good]).any()) for n, v in before.items())
