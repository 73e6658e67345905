"""Plans: every row once per epoch, in an order that is the client's own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.inference.acceleration import groups
from pyrofl.inference.acceleration.groups import buckets, groups_of_wide, roomy
from pyrofl.inference.training.schedules import Schedule, make_schedule
from pyrofl.tensors import generator

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=6)


def rows_of(sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.randperm(sum(sizes), generator=generator(8)).split(sizes))


@settings(deadline=None, max_examples=100)
@given(SIZES, st.data(), st.sampled_from([None, 1, 3, 7, 50]))
def test_every_row_once_per_epoch(sizes, data, batch):
    rows = rows_of(sizes)
    some = st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes))
    epochs = data.draw(some)
    p = make_schedule(rows, epochs, batch, [generator(1, c) for c in range(len(sizes))])
    width = min(batch or max(sizes), max(sizes))
    assert p.rows.shape == p.mask.shape == (int(p.steps.max()), len(sizes), width)
    for c, (mine, many) in enumerate(zip(rows, epochs, strict=True)):
        assert torch.equal(p.rows[:, c], mine[p.at[:, c]]), "padding too is a row of its own"
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
    together = make_schedule(
        rows, [2] * len(sizes), batch, [generator(1, c) for c in range(len(sizes))]
    )
    for c, mine in enumerate(rows):
        alone = make_schedule([mine], [2], batch, [generator(1, c)])
        assert int(alone.steps[0]) == int(together.steps[c])
        for t in range(int(alone.steps[0])):
            ours = together.rows[t, c][together.mask[t, c]]
            assert torch.equal(alone.rows[t, 0][alone.mask[t, 0]], ours)


def test_a_step_lies_in_memory_as_it_does_in_a_longer_plan():
    rows = [torch.arange(7), torch.arange(5)]
    for part in make_schedule(rows, [2, 3], 2, [generator(c) for c in range(2)]):
        assert part.is_contiguous()  # what is recorded of a step is found by its strides


def test_every_epoch_has_an_order_of_its_own():
    found = make_schedule([torch.arange(12)], [4], 5, [generator(0)])
    orders = {tuple(e[m].tolist()) for e, m in zip(*_by_epoch(found, 4), strict=True)}
    assert len(orders) == 4
    assert tuple(range(12)) not in orders


def _by_epoch(found: Schedule, epochs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return found.rows[:, 0].reshape(epochs, -1), found.mask[:, 0].reshape(epochs, -1)


def test_epochs_are_shuffled_minibatches_only():
    (mine,) = rows_of([20])
    whole = make_schedule([mine], [2], None, [generator(1)])
    assert torch.equal(whole.rows[:, 0], torch.stack([mine, mine]))
    p = make_schedule([mine], [2], 20, [generator(1)])
    assert not torch.equal(p.rows[0], p.rows[1])
    assert not torch.equal(p.rows[0, 0], mine)
    again = make_schedule([mine], [2], 20, [generator(2)])
    assert not torch.equal(p.rows, again.rows)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_groups_hold_every_client_once_and_a_cut_spares_what_it_costs(sizes):
    found = buckets(torch.tensor(sizes))
    assert sorted(i for group in found for i in group.tolist()) == list(range(len(sizes)))
    grouped = [[sizes[i] for i in group.tolist()] for group in found]
    assert [size for group in grouped for size in group] == sorted(sizes, reverse=True)
    padded = sum(len(group) * group[0] for group in grouped)
    assert padded + groups.STEP_COST_ROWS * (len(found) - 1) <= len(sizes) * max(sizes)
    for group in grouped:  # nor is there a cut left that would
        assert all(
            (group[0] - size) * (len(group) - at) <= groups.STEP_COST_ROWS
            for at, size in enumerate(group)
        )


def test_groups_of_some_sizes():
    sizes = torch.tensor([5, 900, 5, 870, 5, 5, 5, 800])
    assert [group.tolist() for group in buckets(sizes)] == [
        [1, 3, 7],
        [0, 2, 4, 5, 6],
    ]
    assert [group.tolist() for group in buckets(torch.full((3,), 10**6))] == [[0, 1, 2]]


def test_wide_networks_are_padded_less():
    sizes = torch.tensor([5, 100, 5, 90, 5, 5, 5, 80])
    narrow, wide = (groups_of_wide(sizes, entries, 0) for entries in (100, 100_000))
    assert [group.tolist() for group in narrow] == [[1, 3, 7, 0, 2, 4, 5, 6]]
    assert [group.tolist() for group in wide] == [[1, 3, 7], [0, 2, 4, 5, 6]]


def test_groups_that_modify_more_than_the_cache_are_split_evenly():
    third = groups.CACHED_BYTES // 3
    found = groups_of_wide(torch.full((10,), 7), 1, third)
    assert [len(group) for group in found] == [3, 3, 2, 2]
    assert torch.cat(found).tolist() == list(range(10))
    alone = groups_of_wide(torch.full((2,), 7), 1, 2 * groups.CACHED_BYTES)
    assert [len(group) for group in alone] == [1, 1]


def test_less_than_half_of_a_width_is_padding():
    assert roomy(torch.tensor([9, 3]), 5000) == 12
    assert roomy(torch.tensor([70, 3]), 80) == 80
