"""Batches and federations: every row where it belongs."""

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

from pyrofl.data import Batch, Federation, check_table, stack
from pyrofl.inference.evaluation.prepare import population_of
from pyrofl.inference.training.schedules import make_schedule
from pyrofl.tensors import generator

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def rows_of(sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.randperm(sum(sizes), generator=generator(8)).split(sizes))


# Batches.


@settings(deadline=None, max_examples=40)
@given(SIZES)
def test_a_stack_is_padded_with_the_clients_first_row(sizes):
    x = torch.arange(sum(sizes)).double()[:, None] * torch.tensor([1.0, 10.0])
    rows = rows_of(sizes)
    data = Federation(x, torch.arange(sum(sizes)), tuple(rows), tuple(rows))
    ids = torch.arange(len(sizes)).flip(0)
    batch = data.batch(ids)
    assert batch.x.shape == (len(sizes), max(sizes), 2)
    assert batch.size.tolist() == [len(rows[i]) for i in ids]
    assert batch.size.dtype == torch.float64
    assert len(batch) == len(sizes)
    assert torch.equal(batch.cohort.ids, ids)
    for c, i in enumerate(ids.tolist()):
        assert torch.equal(batch.y[c][batch.mask[c]], rows[i])
        assert torch.equal(batch.x[c][batch.mask[c]], x[rows[i]])
        assert (batch.y[c][~batch.mask[c]] == rows[i][0]).all()


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
    first = stack(data, [r[:width] for r in rows], data.cohort(torch.arange(len(sizes))))
    part = torch.stack([each[r[:width]].mean() * len(r) for r in rows])
    torch.testing.assert_close(log_likelihood(first), part)


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(1, 20))
def test_padding_is_a_row_of_the_clients_own(sizes, width):
    rows = rows_of(sizes)
    table = torch.arange(sum(sizes))
    tests = [r[:0] if c % 2 else r[:1] for c, r in enumerate(rows)]  # some have no test row
    data = Federation(table[:, None].double(), table, tuple(rows), tuple(tests))
    ids = torch.arange(len(sizes)).flip(0)
    some = stack(data, [rows[i][:width] for i in ids.tolist()], data.cohort(ids))
    for batch in (data.batch(ids), data.batch(ids, "test"), some):
        for i, shown in zip(ids.tolist(), batch.y, strict=True):
            assert set(shown.tolist()) <= set(rows[i].tolist())


@settings(deadline=None, max_examples=30)
@given(SIZES, st.integers(1, 3))
@example([1, 2], 3)
def test_split_deals_every_row_and_leaves_no_part_empty(sizes, k):
    rows = rows_of(sizes)
    table = torch.arange(sum(sizes))
    data = Federation(table[:, None].double(), table, tuple(rows), tuple(rows))
    batch = data.batch(torch.arange(len(sizes)))
    parts = batch.split(k)
    assert len(parts) == k
    for c, mine in enumerate(rows):
        dealt = [part.y[c][part.mask[c]] for part in parts]
        assert set(torch.cat(dealt).tolist()) == set(mine.tolist())
        assert sum(map(len, dealt)) == max(len(mine), k), "rows serve again only to fill a part"
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
    assert data.cohort(torch.tensor([2, 0])).size.tolist() == [7, 3]
    lists = replace(data, train=list(data.train), test=list(data.test))
    assert isinstance(lists.train, tuple)
    assert isinstance(lists.test, tuple)


def test_a_federation_tells_what_it_is():
    data = replace(
        toys.blobs((3, 5, 8), held_out=1), server_data=torch.ones(7, toys.FEATURES).double()
    )
    assert repr(data).splitlines() == [
        "Federation",
        "  clients        2, and 1 held out",
        "  training rows  3 to 8 per client, median 5; 16 in all",
        "  test rows      4 to 4 per client, median 4; 12 in all",
        "  x              float64 [8] per row",
        "  y              5 classes",
        "  server         7 rows of its own",
    ]
    assert "<th>x</th><td>float64 [8] per row</td>" in data._repr_html_()
    response = replace(data, y=data.x[:, 0], classes=(), server_data=None)
    assert "float64 [] per row\n  server         0 rows" in repr(response)


def test_device_and_type_go_through():
    data = toys.blobs((3, 5))
    single = data.to("cpu", torch.float32)
    assert (single.x.dtype, single.y.dtype, single.dtype) == (
        torch.float32,
        torch.int64,
        torch.float32,
    )
    assert data.to("cpu").x.dtype == torch.float64
    assert torch.equal(data.to(torch.float32).x, single.x)
    assert single.batch(torch.tensor([0])).size.dtype == torch.float32
    pixels = replace(data, x=data.x.to(torch.uint8))
    assert pixels.dtype == torch.get_default_dtype()
    response = replace(data, y=data.x[:, 0], classes=()).to("cpu", torch.float32)
    assert response.y.dtype == torch.float32


def test_the_rows_of_the_server_move_with_the_others():
    data = replace(toys.blobs((3, 5)), server_data=torch.ones(7, toys.FEATURES).double())
    assert data.to("cpu", torch.float32).server_data.dtype == torch.float32
    assert data.to("cpu").server_data.shape == (7, toys.FEATURES)
    assert toys.blobs((3, 5)).to("cpu", torch.float32).server_data is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            torch.zeros(4, 3).double(),
            r"server_data is torch.float64 \[4, 3\]; expected torch.float64",
        ),
        (torch.zeros(4, toys.FEATURES), r"server_data is torch.float32 .* of shape \[8\]"),
        (torch.zeros(0, toys.FEATURES).double(), r"\[0, 8\]; .* at least one"),
        (torch.full((2, toys.FEATURES), torch.nan).double(), "server_data is NaN or infinite in 2"),
    ],
)
def test_rows_of_the_server_unlike_the_clients_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        replace(toys.blobs((3, 5)), server_data=rows)


NOTHING = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8])
def test_other_integers_name_rows_as_well(kind):
    data = toys.blobs((3, 5))
    narrow = replace(
        data,
        train=[rows.to(kind) for rows in data.train],
        test=[rows.to(kind) for rows in data.test],
        pooled_test=torch.arange(8, 12, dtype=kind),
    )
    for rows, found in zip(data.train + data.test, narrow.train + narrow.test, strict=True):
        assert found.dtype == torch.int64
        assert torch.equal(rows, found)
    assert narrow.pooled_test.dtype == torch.int64
    nobody = replace(data, test=(torch.tensor([]), torch.tensor([4])))
    assert nobody.test[0].dtype == torch.int64


def test_names_may_be_lists_and_that_of_the_pooled_rows():
    lists = {"names": ["all test rows", "b"], "classes": list("abcde")}
    data = replace(toys.blobs((3, 5)), **lists, pooled_test=torch.arange(8, 12))
    assert (data.names, data.classes) == (("all test rows", "b"), tuple("abcde"))
    pooled, (last,) = population_of(data, "pooled")
    assert pooled.names[last] == "all test rows, pooled"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", ["x", "y"])
def test_data_that_are_not_finite_are_refused(column, bad):
    table = {"x": torch.zeros(4, 2, 2), "y": torch.zeros(4)}
    table[column][[1, 3]] = bad
    with pytest.raises(ValueError, match=f"{column} is NaN or infinite in 2 rows, first in row 1"):
        check_table(table["x"], table["y"])


def test_what_is_known_of_rows_follows_them_through_minibatches_and_splits():
    train = torch.tensor([4, 2, 7, 0]), torch.tensor([1, 8, 3])
    data = Federation(torch.arange(9.0)[:, None], torch.zeros(9), train, (train[0][:0],) * 2)
    whole = data.batch(torch.arange(2))
    known = 10 * whole.x  # [C, n, 1], in the order of the client's rows
    assert torch.equal(whole.take_rows(known), known)
    padded = torch.cat([known, torch.zeros(2, 3, 1)], 1)  # as beside clients of more rows
    assert torch.equal(whole.take_rows(padded), known)
    schedule = make_schedule(list(train), [2, 2], 3, [generator(1, c) for c in range(2)])
    for t in range(2):
        batch = data.gather(
            data.cohort(torch.arange(2)), schedule.rows[t], schedule.mask[t], schedule.at[t]
        )
        for part in (batch, *batch.split(2), *whole.split(2)):
            assert torch.equal(part.take_rows(known)[part.mask], 10 * part.x[part.mask])


def test_federations_are_keys_of_dictionaries_by_identity(tiny):
    # From Python 3.13, == of a dataclass compares field by field, which tensors refuse.
    assert tiny != replace(tiny)
    assert {tiny: 1}[tiny] == 1
    assert Federation.__eq__ is object.__eq__
