"""Batches, federations and plans: every row where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyro import poutine

from pyrofl.data import Batch, Federation, check_table, plan, stack
from pyrofl.tensors import generator

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def rows_of(sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.randperm(sum(sizes), generator=generator(8)).split(sizes))


# Plans.


@settings(deadline=None, max_examples=100)
@given(SIZES, st.data(), st.sampled_from([None, 1, 3, 7, 50]))
def test_every_row_once_per_epoch(sizes, data, batch):
    rows = rows_of(sizes)
    some = st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes))
    epochs = data.draw(some)
    p = plan(rows, epochs, batch, [generator(1, c) for c in range(len(sizes))])
    width = min(batch or max(sizes), max(sizes))
    assert p.rows.shape == p.mask.shape == (int(p.steps.max()), len(sizes), width)
    for c, (mine, many) in enumerate(zip(rows, epochs, strict=True)):
        per_epoch = -(-len(mine) // width)
        assert int(p.steps[c]) == many * per_epoch
        assert not p.mask[p.steps[c] :, c].any()
        for e in range(many):
            steps = slice(e * per_epoch, (e + 1) * per_epoch)
            taken = p.rows[steps, c][p.mask[steps, c]]
            assert sorted(taken.tolist()) == sorted(mine.tolist())
            # All minibatches but the last are full, none is empty, and padding comes last.
            counts = p.mask[steps, c].sum(1)
            assert (counts[:-1] == width).all()
            assert counts[-1] >= 1
            assert (p.mask[steps, c].int().diff(dim=1) <= 0).all()


@settings(deadline=None, max_examples=40)
@given(SIZES, st.sampled_from([None, 1, 3, 7]))
def test_the_plan_of_a_client_is_its_own(sizes, batch):
    rows = rows_of(sizes)
    together = plan(rows, [2] * len(sizes), batch, [generator(1, c) for c in range(len(sizes))])
    for c, mine in enumerate(rows):
        alone = plan([mine], [2], batch, [generator(1, c)])
        assert int(alone.steps[0]) == int(together.steps[c])
        for t in range(int(alone.steps[0])):
            ours = together.rows[t, c][together.mask[t, c]]
            assert torch.equal(alone.rows[t, 0][alone.mask[t, 0]], ours)


def test_epochs_are_shuffled_minibatches_only():
    (mine,) = rows_of([20])
    whole = plan([mine], [2], None, [generator(1)])
    assert torch.equal(whole.rows[:, 0], torch.stack([mine, mine]))
    p = plan([mine], [2], 20, [generator(1)])
    assert not torch.equal(p.rows[0], p.rows[1])
    assert not torch.equal(p.rows[0, 0], mine)
    again = plan([mine], [2], 20, [generator(2)])
    assert not torch.equal(p.rows, again.rows)


# Batches.


@settings(deadline=None, max_examples=40)
@given(SIZES)
def test_a_stack_is_padded_with_row_0(sizes):
    x = torch.arange(sum(sizes)).double()[:, None] * torch.tensor([1.0, 10.0])
    rows = rows_of(sizes)
    data = Federation(x, torch.arange(sum(sizes)), tuple(rows), tuple(rows))
    ids = torch.arange(len(sizes)).flip(0)
    batch = data.batch(ids)
    assert batch.x.shape == (len(sizes), max(sizes), 2)
    assert batch.size.tolist() == [len(rows[i]) for i in ids]
    assert batch.size.dtype == torch.float64
    assert len(batch) == len(sizes)
    assert torch.equal(batch.who.ids, ids)
    for c, i in enumerate(ids.tolist()):
        assert torch.equal(batch.y[c][batch.mask[c]], rows[i])
        assert torch.equal(batch.x[c][batch.mask[c]], x[rows[i]])
        assert (batch.y[c][~batch.mask[c]] == 0).all()


def test_test_rows_and_clients_without_any():
    data = replace(toys.blobs((3, 5)), test=(torch.tensor([1, 2]), torch.zeros(0).long()))
    batch = data.batch(torch.tensor([0, 1]), "test")
    assert batch.mask.tolist() == [[True, True], [False, False]]
    nobody = data.batch(torch.tensor([1]), "test")
    assert nobody.mask.tolist() == [[False]]
    assert nobody.size.tolist() == [5]  # training rows, as everywhere


def log_likelihood(batch: Batch) -> torch.Tensor:
    """Return what a model over the plates scores, [C]."""

    def model() -> None:
        with batch.clients(), batch.rows():
            pyro.sample("y", dist.Normal(batch.x[..., 0], 1.0), obs=batch.x[..., 1])

    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    value: torch.Tensor = trace.nodes["y"]["log_prob"].sum(-1)
    return value


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(1, 20))
def test_plates_hide_padding_and_scale_to_the_client(sizes, width):
    g = generator(2)
    x = torch.randn(sum(sizes), 2, generator=g, dtype=torch.float64)
    rows = rows_of(sizes)
    data = Federation(x, torch.arange(sum(sizes)), tuple(rows), tuple(rows))
    each = dist.Normal(x[:, 0], 1.0).log_prob(x[:, 1])
    whole = log_likelihood(data.batch(torch.arange(len(sizes))))
    torch.testing.assert_close(whole, torch.stack([each[r].sum() for r in rows]))
    first = stack(data, [r[:width] for r in rows], data.who(torch.arange(len(sizes))))
    part = torch.stack([each[r[:width]].mean() * len(r) for r in rows])
    torch.testing.assert_close(log_likelihood(first), part)


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(1, 3))
@example([1, 2], 3)
def test_split_deals_every_row_once(sizes, k):
    rows = rows_of(sizes)
    table = torch.arange(sum(sizes))
    data = Federation(table[:, None].double(), table, tuple(rows), tuple(rows))
    batch = data.batch(torch.arange(len(sizes)))
    parts = batch.split(k)
    assert len(parts) == k
    for c, mine in enumerate(rows):
        dealt = [part.y[c][part.mask[c]] for part in parts]
        assert sorted(torch.cat(dealt).tolist()) == sorted(mine.tolist())
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for part in parts:
        assert torch.equal(part.size, batch.size)
        assert log_likelihood(replace(part, x=part.x.expand(*part.x.shape[:2], 2))).shape == (
            len(sizes),
        )


# Federations.


def test_sizes_names_and_held_out_clients():
    data = toys.blobs((3, 5, 7), held_out=1)
    assert data.clients == 2
    assert data.sizes.tolist() == [3, 5, 7]
    assert data.names == ("client 0", "client 1", "client 2")
    assert data.who(torch.tensor([2, 0])).size.tolist() == [7, 3]
    lists = replace(data, train=list(data.train), test=list(data.test))
    assert isinstance(lists.train, tuple)
    assert isinstance(lists.test, tuple)


def test_device_and_type_go_through():
    data = toys.blobs((3, 5))
    single = data.to("cpu", torch.float32)
    assert (single.x.dtype, single.y.dtype, single.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
    )
    assert data.to("cpu").x.dtype == torch.float64
    assert single.batch(torch.tensor([0])).size.dtype == torch.float32
    pixels = replace(data, x=data.x.to(torch.uint8))
    assert pixels.dtype == torch.get_default_dtype()
    response = replace(data, y=data.x[:, 0], classes=()).to("cpu", torch.float32)
    assert response.y.dtype == torch.float32


NOTHING = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": (torch.tensor([0]), NOTHING)}, "client 1 has no training row"),
        ({"train": (torch.tensor([0]),)}, "differ in length: 1, 2, 2; expected one entry per"),
        ({"names": ("a",)}, "differ in length: 2, 2, 1"),
        ({"names": ("a", "a")}, "expected no two alike"),
        ({"held_out": 2}, "held_out is 2; expected 0 to 1"),
        ({"held_out": -1}, "held_out is -1; expected 0 to 1"),
        (
            {"train": (torch.tensor([0]), torch.tensor([4, 99]))},
            "client 1: train names row 99; expected 0 to 15",
        ),
        (
            {"test": (torch.tensor([5, -1]), torch.tensor([4]))},
            "client 0: test names row -1; expected 0 to 15",
        ),
        ({"y": torch.zeros(3, dtype=torch.long)}, "x has 16 rows and y has 3; expected as many"),
        ({"classes": ("a", "b")}, "labels run from 0 to 4; expected 0 to 1, as there are 2"),
        ({"y": torch.full((16,), -1)}, "labels run from -1 to -1; expected 0 to 4"),
        ({"y": torch.zeros(16)}, "y is torch.float32; expected integer labels for 5 classes"),
    ],
)
def test_a_federation_that_cannot_train_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(toys.blobs((3, 5)), **change)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", ["x", "y"])
def test_data_that_are_not_finite_are_refused(column, bad):
    table = {"x": torch.zeros(4, 2, 2), "y": torch.zeros(4)}
    table[column][[1, 3]] = bad
    with pytest.raises(ValueError, match=f"{column} is NaN or infinite in 2 rows, first in row 1"):
        check_table(table["x"], table["y"])
