"""A batch's columns by name, and the entry of a vector that a column selects for each row."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl import Federation

ITEMS = 4


def tables():
    """Build three clients of 7, 5 and 9 rows with the columns age and item."""
    generator, clients = torch.Generator().manual_seed(0), {}
    for name, rows in {"bern": 7, "basel": 5, "chur": 9}.items():
        age, y = torch.randn(2, rows, generator=generator, dtype=torch.float64)
        x = torch.stack([age, torch.arange(rows).double() % ITEMS], -1)
        clients[name] = x, y
    return Federation.from_arrays(clients, features=["age", "item"])


@pytest.fixture
def data():
    return tables()


def effects(select):
    """Return a program with effects of clients and of crossed items, which `select` looks up."""

    def model(received, local, batch):
        with batch.clients():
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            items = pyro.sample("items", dist.Normal(0.0, 1.0).expand([ITEMS]).to_event(1))
            own = pyro.sample("own", dist.Normal(0.0, tau))
            with batch.rows():
                pyro.sample("y", dist.Normal(own + select(batch, items), 1.0), obs=batch.y)

    return model


def by_hand(batch, items):
    level = batch.x[..., 1].long().expand(*items.shape[:-2], -1)
    return items.squeeze(-2).gather(-1, level)


def by_name(batch, items):
    return batch.gather(items, "item")


def test_a_column_has_a_name_or_a_number(data):
    batch = data.batch(torch.arange(3))
    assert batch.column("item").equal(batch.x[..., 1])
    assert batch.column(0).equal(batch.column("age"))
    assert batch.select_clients(slice(1, 2)).column("age").equal(batch.x[1:2, :, 0])


@pytest.mark.parametrize("leading", [(), (5,), (2, 5)])
@pytest.mark.parametrize("clients", [1, 3])
def test_every_row_has_the_entry_of_its_level(data, leading, clients):
    batch = data.batch(torch.arange(clients))
    values = torch.randn(*leading, clients, 1, ITEMS).double()
    entries = batch.gather(values, "item")
    assert entries.shape == (*leading, clients, batch.mask.shape[1])
    level = batch.x[..., 1].long()
    for client in range(clients):
        for row in range(batch.mask.shape[1]):
            expected = values[..., client, 0, level[client, row]]
            assert entries[..., client, row].equal(expected)
    shared = values[..., :1, :, :]  # the same vector for all clients
    assert batch.gather(shared, 1).equal(batch.gather(shared.expand_as(values), 1))


def test_fits_are_those_of_programs_that_index_by_hand(data):
    runs = [
        pyrofl.fit(pyrofl.hierarchical(effects(select), data, shared="tau items"), data, 1,
                   progress=False)
        for select in (by_hand, by_name)
    ]  # fmt: skip
    first, second = (run.to_arviz(draws=100).posterior for run in runs)
    assert first.equals(second)


SHAPE = r"expected \[..., 3, 1, K\]"
NUMBERS = "has other numbers than the whole ones from 0 to"


@pytest.mark.parametrize(
    ("shape", "column", "message"),
    [
        ((3, 1, ITEMS), "Item", "the batch has no column 'Item'; expected one of age, item"),
        ((3, 1, ITEMS), 2, "column is 2; expected 0 to 1"),
        ((3, ITEMS), "item", rf"values has shape \[3, 4\]; {SHAPE}"),
        ((5, 3, ITEMS), "item", rf"values has shape \[5, 3, 4\]; {SHAPE}"),
        ((2, 1, ITEMS), "item", rf"values has shape \[2, 1, 4\]; {SHAPE}"),
        ((3, 1, 3), "item", f"column 'item' {NUMBERS} 2"),
        ((3, 1, ITEMS), "age", f"column 'age' {NUMBERS} 3"),
    ],
)
def test_what_selects_no_entry_is_refused(data, shape, column, message):
    with pytest.raises(ValueError, match=message):
        data.batch(torch.arange(3)).gather(torch.zeros(shape), column)


def test_columns_without_names_have_numbers(data):
    batch = replace(data, source=None).batch(torch.arange(3))
    assert batch.gather(torch.zeros(3, 1, ITEMS), 1).shape == batch.mask.shape
    with pytest.raises(ValueError, match="columns have no names; expected a number from 0 to 1"):
        batch.column("item")


def test_images_have_no_columns():
    import toys

    batch = toys.blobs().batch(torch.arange(3))
    images = replace(batch, x=batch.x[..., None, None])
    with pytest.raises(ValueError, match=r"x has shape .*; expected rows of numbers"):
        images.column(0)
