"""Dicts of tensors: names, client axes, bytes and seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.tensors import (
    client_bytes,
    cut,
    dense_bytes,
    generator,
    join_up,
    matches,
    pick,
    role,
    seeded,
    sparse_bytes,
    spread_out,
    under,
)

STATE = {"loc/fc.weight": torch.ones(3, 2), "locus/a": torch.zeros(3), "tau": torch.arange(3.0)}


def test_roles_are_whole_words():
    assert role("loc", STATE).keys() == {"fc.weight"}
    assert role("lo", STATE) == {}
    assert under("loc", role("loc", STATE)).keys() == {"loc/fc.weight"}


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text("abc./", max_size=5), st.integers(0, 9), max_size=4))
def test_under_and_role_are_inverse(numbers):
    tensors = {n: torch.tensor(v) for n, v in numbers.items()}
    assert role("some", under("some", tensors)) == tensors
    assert role("other", under("some", tensors)) == {}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("*", set(STATE)),
        ("loc/*", {"loc/fc.weight"}),
        ("loc* tau", set(STATE)),
        ("tau nothing", {"tau"}),
        ("", set()),
        ("LOC/*", set()),
    ],
)
def test_patterns_pick_names(patterns, names):
    assert pick(STATE, patterns).keys() == names
    assert all(matches(n, patterns) == (n in names) for n in STATE)


def test_spreading_out_copies_nothing():
    start = {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(2.0)}
    wide = spread_out(start, 4)
    assert {n: tuple(v.shape) for n, v in wide.items()} == {"w": (4, 2, 3), "s": (4,)}
    assert wide["w"].data_ptr() == start["w"].data_ptr()
    assert all(torch.equal(wide["w"][c], start["w"]) for c in range(4))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.data())
def test_cutting_is_indexing(clients, data):
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, clients - 1), max_size=7)), dtype=torch.long
    )
    own = {"a": torch.randn(clients, 2), "b": torch.arange(clients), "c": torch.zeros(clients, 0)}
    state = own | spread_out({"shared": torch.arange(3.0)}, clients)
    for name, value in cut(state, index).items():
        assert torch.equal(value, state[name][index])
    for name, value in cut(state, slice(2)).items():
        assert torch.equal(value, state[name][:2])
    if len(index) and clients > 1:
        assert cut(state, index)["shared"].stride(0) == 0


@pytest.mark.parametrize(
    "index", [[-1], [-1, 0], [2, 3], [1], [0, 1, 2, 3], [3, 2], [True, False, True, True], []]
)
def test_any_index_cuts_as_it_indexes(index):
    value, at = torch.arange(8.0).view(4, 2), torch.tensor(index)
    at = at if index else at.long()
    assert torch.equal(cut({"a": value}, at)["a"], value[at])


def test_parts_are_joined_up():
    parts = [cut(STATE, slice(0, 1)), cut(STATE, slice(1, 3))]
    for n, v in join_up(parts).items():
        assert torch.equal(v, STATE[n])
    assert join_up(iter(parts)).keys() == STATE.keys()
    assert join_up([]) == {}


def test_what_is_only_expanded_stays_so_when_parts_are_joined_up():
    value = torch.arange(6.0).view(2, 3)
    parts = [{"w": value.expand(n, 2, 3)} for n in (2, 4)]
    whole = join_up(parts)["w"]
    assert whole.data_ptr() == value.data_ptr()
    assert torch.equal(whole, value.expand(6, 2, 3))
    square = value[:, :2]
    for one, other in (
        (value, value + 1),
        (value, value.double()),
        (square, square.T),
        (value, value.view(torch.int32).view(torch.float32)),
    ):
        mixed = [{"w": v.expand(2, *v.shape)} for v in (one, other)]
        expected = torch.cat([part["w"] for part in mixed])
        assert torch.equal(join_up(mixed)["w"], expected)
    rows = torch.arange(6.0)
    shifted = [{"w": rows[:3].expand(2, 3)}, {"w": rows[3:].expand(2, 3)}]
    assert join_up(shifted)["w"].tolist() == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert (
        join_up([{"w": rows[:0].expand(0, 0)}, {"w": rows.expand(2, 6)[:, :0]}])["w"].numel() == 0
    )


def test_bytes_are_those_of_one_client():
    state = {
        "a": torch.zeros(5, 3, 2),
        "b": torch.zeros(5, dtype=torch.float64),
        "n": torch.zeros(5, 2, dtype=torch.int8),
    }
    assert client_bytes(state) == 6 * 4 + 8 + 2
    assert client_bytes(spread_out({"a": torch.zeros(7)}, 3)) == 28
    assert client_bytes({"none": torch.zeros(0, 3)}) == 0


def test_generators_depend_on_the_key_alone():
    def first(*key):
        return torch.randn(3, generator=generator(*key)).tolist()

    assert first(1, 2, 3, 4) == first(1, 2, 3, 4)
    keys = [(1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 3, 5), (1, 2, 4, 4), (0, 2, 3, 4), (2**40, 2, 3, 4)]
    assert len({tuple(first(*key)) for key in keys}) == len(keys)


def test_streams_of_clients_do_not_resemble_each_other():
    draws = torch.stack([torch.randn(2000, generator=generator(0, 3, 1, i)) for i in range(20)])
    others = torch.corrcoef(draws)[~torch.eye(20, dtype=torch.bool)]
    assert others.abs().max() < 4.5 / 2000**0.5


def fail_while_seeded() -> None:
    with seeded(4):
        torch.randn(2)
        raise RuntimeError("inside")


def test_seeding_is_for_a_while():
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    drawn = []
    for seed in (3, 3, 4):
        with seeded(seed):
            drawn.append(torch.randn(2).tolist())
    with pytest.raises(RuntimeError, match="inside"):
        fail_while_seeded()
    generator(3)
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert random.getstate() == before[2]


def test_the_wire_counts_every_entry_or_those_that_are_not_zero():
    state = {"a": torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 5.0]]), "b": torch.ones(2, 4).double()}
    assert dense_bytes(state).tolist() == [12 + 32] * 2
    # Two and one floats with a byte of bits for three entries; the full tensor goes as it is.
    assert sparse_bytes(state).tolist() == [8 + 1 + 32, 4 + 1 + 32]
    assert sparse_bytes({"a": torch.zeros(2, 9)}).tolist() == [2, 2]
    assert (
        dense_bytes({"a": torch.zeros(0, 3)}).tolist()
        == sparse_bytes({"a": torch.zeros(0, 3)}).tolist()
        == []
    )
