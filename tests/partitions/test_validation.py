"""Rows held back inside the clients."""

from __future__ import annotations

import pytest
import torch
import toys

from pyrofl.data import Federation
from pyrofl.partitions.validation import held_back


def test_every_client_keeps_and_gives_rows_of_its_own():
    data = toys.blobs(held_out=2)
    held = held_back(data, 0.25, seed=1)
    assert held.clients == data.clients == 10
    assert held.held_out == 0
    assert held.names == data.names[:10]
    for kept, aside, rows in zip(held.train, held.test, data.train, strict=False):
        assert len(kept) + len(aside) == len(rows)
        assert len(aside) == max(1, round(0.25 * len(rows)))
        both = held.x[torch.cat([kept, aside])]
        assert torch.equal(both.sort(0).values, data.x[rows].sort(0).values)
    assert torch.equal(held.pooled_test, torch.cat(held.test).sort().values)
    large = held.y[held.test[1]].bincount(minlength=5), data.y[data.train[1]].bincount(minlength=5)
    assert bool(((large[0] - large[1] / 4).abs() < 1).all())  # each class in proportion


def test_it_is_drawn_by_its_seed():
    data = toys.blobs()
    one, same, other = (held_back(data, seed=seed).test for seed in (1, 1, 2))
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, other))


def test_a_client_with_a_single_row_keeps_it():
    held = held_back(toys.blobs((1, 2, 3)))
    assert [len(rows) for rows in held.train] == [1, 1, 2]
    assert [len(rows) for rows in held.test] == [0, 1, 1]
    with pytest.raises(ValueError, match="no client has two training rows; expected one at least"):
        held_back(toys.blobs((1, 1)))


def test_rows_that_several_clients_have_stay_with_each():
    x = torch.arange(6.0)[:, None]
    rows = (torch.tensor([0, 1, 2, 3]), torch.tensor([2, 3, 4, 5]))
    held = held_back(Federation(x, x[:, 0], rows, (rows[0][:0],) * 2), 0.5)
    assert len(held.x) == 6
    assert [len(r) for r in (*held.train, *held.test)] == [2, 2, 2, 2]
