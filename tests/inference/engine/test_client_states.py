"""Private state of many clients: an immutable mapping."""

from __future__ import annotations

import gc
from dataclasses import replace

import faults
import pytest
import torch
import toys

from pyrofl.inference.engine.client_states import ClientStates, RowStore
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.models import pfedvem
from pyrofl.tensors import Tensors


def runs(blobs, **what):
    method = pfedvem.build(toys.net(), num_particles=2, head_epochs=2, base_epochs=1)
    draw = fixed(5)
    return federate(method, blobs, 4, participation=draw, training_clients=draw, **what)


def begun(clients: int = 4) -> ClientStates:
    return ClientStates(clients, RowStore(clients), {}, {})


def rows(states: ClientStates, ids: list[int], value: float) -> ClientStates:
    """Return states in which a table `a` [J, 2] has other rows."""
    values = {"a": torch.full((len(ids), 2), value)}
    return states.updated(states.write(torch.tensor(ids), values))


def test_a_state_of_clients_never_changes(blobs):
    states, copies = [], []
    for state in runs(blobs):
        states.append(state)
        copies.append({n: v.clone() for n, v in state.client_states.items()})
    assert (copies[0]["tau"] != 0).sum() == 5
    assert not torch.equal(copies[3]["tau"], copies[2]["tau"])
    for state, copy in zip(states, copies, strict=True):
        toys.assert_same(dict(state.client_states), copy)
        toys.assert_same(
            state.get_client_states(torch.tensor([7, 2])), {n: v[[7, 2]] for n, v in copy.items()}
        )
    with pytest.raises(TypeError):
        states[0].client_states["tau"] = copies[0]["tau"]
    table = states[0].client_states["tau"]
    table += 1  # a table that was read is the caller's
    toys.assert_same(dict(states[0].client_states), copies[0])


def test_a_round_that_fails_on_its_way_leaves_the_state_before(blobs):
    method = pfedvem.build(toys.net(), num_particles=2, head_epochs=2, base_epochs=1)
    states = federate(method, blobs, 3, chunk_size=3)
    state = next(states)
    before = {n: v.clone() for n, v in state.client_states.items()}

    def fail(*_: object) -> Tensors:
        raise KeyboardInterrupt

    broken = replace(method, aggregate=fail)
    with pytest.raises(KeyboardInterrupt):
        next(federate(broken, blobs, 3, chunk_size=3, resume_from=state))
    toys.assert_same(before, dict(state.client_states))
    *_, resumed = federate(method, blobs, 3, chunk_size=3, resume_from=state)
    *_, whole = federate(method, blobs, 3, chunk_size=3)
    toys.assert_same(dict(whole.client_states), dict(resumed.client_states))
    toys.assert_same(whole.server, resumed.server)


def test_rows_that_no_state_holds_are_written_again():
    one = rows(begun(), [0, 1, 2, 3], 1.0)
    two = rows(one, [1, 3], 2.0)
    (block, more) = one.store.blocks  # both states hold the rows of clients 0 and 2
    assert (len(block.free), len(more.free)) == (0, 0)
    assert one["a"][:, 0].tolist() == [1, 1, 1, 1]
    assert two["a"][:, 0].tolist() == [1, 2, 1, 2]
    del one
    gc.collect()
    assert sorted(block.free) == [1, 3]
    three = rows(two, [0, 1], 3.0)
    assert two["a"][:, 0].tolist() == [1, 2, 1, 2]
    assert three["a"][:, 0].tolist() == [3, 3, 1, 2]
    assert three.store.blocks == [block, more]
    untaken = three.write(torch.tensor([0]), {"a": torch.zeros(1, 2)})
    assert three["a"][:, 0].tolist() == [3, 3, 1, 2]
    assert three.store.blocks[2].free == []
    del untaken
    assert three.store.blocks[2].free == [0]


def test_tensors_of_the_caller_are_not_written():
    table = torch.arange(4.0)[:, None].expand(4, 2).clone()
    seen = torch.tensor([True, True, False, False])
    states = ClientStates.of({"a": table}, seen)
    assert states["a"][:, 0].tolist() == [0, 1, 0, 0]
    after = rows(states, [1, 2], 9.0)
    del states
    more = rows(after, [1, 3], 8.0)
    assert more["a"][:, 0].tolist() == [0, 8, 9, 8]
    assert table[:, 0].tolist() == [0, 1, 2, 3]


def test_clients_may_keep_other_names_than_before():
    states = rows(begun(), [0, 1], 1.0)
    wider = states.updated(states.write(torch.tensor([1, 2]), {"b": torch.ones(2, 1)}))
    assert set(wider) == {"a", "b"}
    assert wider["a"][:, 0].tolist() == [1, 1, 0, 0]
    assert wider["b"][:, 0].tolist() == [0, 1, 1, 0]
    found = wider.select(torch.tensor([2, 1, 0]))
    assert {n: v[:, 0].tolist() for n, v in found.items()} == {"a": [0, 1, 1], "b": [1, 1, 0]}
    assert set(states) == {"a"}
    with pytest.raises(KeyError):
        states["b"]


def test_a_round_in_which_nobody_keeps_anything_makes_no_rows():
    states = begun()
    assert states.write(torch.tensor([0]), {}) == {}
    assert dict(states.updated({})) == {} == states


def test_two_runs_that_go_on_from_one_round_do_not_meet(blobs):
    method = pfedvem.build(toys.net(), num_particles=2, head_epochs=2, base_epochs=1)
    start = next(federate(method, blobs, 1, training_clients=fixed(5)))
    one = federate(method, blobs, 3, training_clients=fixed(5), resume_from=start)
    other = federate(method, blobs, 3, training_clients=fixed(5), resume_from=start)
    pairs = [(next(one), next(other)) for _ in range(2)]
    for a, b in pairs:
        toys.assert_same_round(a, b)


def test_clients_whose_messages_are_left_out_in_the_end_keep_what_they_had(blobs):
    method = pfedvem.build(toys.net(), num_particles=2, head_epochs=1, base_epochs=1)
    odd = faults.corrupted(method, faults.POISONS["wrong type"][0], 3, 8)
    ids = torch.arange(12)
    good = torch.tensor([i for i in range(12) if i not in (3, 8)])
    begun = run_round(odd, blobs, first(method, blobs, 0), ids, ids, chunk_size=1)
    assert begun.reporters.ids.tolist() == good.tolist()
    assert not any(bool(v[[3, 8]].any()) for v in begun.client_states.values())
    whole = run_round(
        faults.corrupted(method, faults.POISONS["NaN"][0]), blobs, begun, ids, ids, chunk_size=1
    )
    before = dict(whole.client_states)
    unknown = replace(whole, message={})  # no form is known from an earlier round
    after = run_round(odd, blobs, unknown, ids, ids, chunk_size=1)
    assert len(after.rejected) == 2
    toys.assert_same(
        {n: v[[3, 8]] for n, v in after.client_states.items()},
        {n: v[[3, 8]] for n, v in before.items()},
    )
    assert any(bool((after.client_states[n][good] != v[good]).any()) for n, v in before.items())
