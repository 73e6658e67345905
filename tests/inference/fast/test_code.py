"""Straight code for recordings: what becomes one operation, what is left out, where results lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import toys
from torch import Tensor

from pyrofl.inference.fast import code, replay
from pyrofl.inference.fast.code import Given, compiled
from pyrofl.inference.fast.tape import NotRecorded, Tape
from pyrofl.inference.loop.rounds import federate
from pyrofl.models import fedavg


def run_of(step: Callable[..., object], moving: Tensor, *passing: Tensor) -> list[str]:
    """Return what the code of a step runs, once it has made the same bits as the step."""
    copy, tape = moving.clone(), Tape()
    with tape:
        step(moving, *passing)
    bind, _ = compiled(tape, Given([moving], passing=passing))
    run = bind(copy)
    with Tape() as made:
        run(*passing)
    assert torch.equal(copy, moving)
    names = [str(call.op._schema.name[6:]) for call in made.calls]
    return [name for name in names if name != "as_strided"]


@pytest.mark.parametrize("clients", [1, 3])
def test_a_product_is_added_where_nobody_reads_any_more(clients):
    def step(weight: Tensor, x: Tensor, grad: Tensor) -> None:
        pull = weight.reshape(clients, 1, -1) * 0.1
        weight.sub_(pull.view(clients, 4, 5) + torch.bmm(grad.mT, x))

    x, grad = torch.rand(clients, 6, 5), torch.rand(clients, 6, 4)
    assert run_of(step, torch.rand(clients, 4, 5), x, grad) == ["mul", "baddbmm_", "sub_"]


def test_what_is_gathered_from_zeros_is_added_at_once():
    def step(weight: Tensor, at: Tensor, x: Tensor, grad: Tensor) -> None:
        part = weight.new_zeros(2, 6, 5)
        part.view(12, 5).index_add_(0, at, grad.view(-1, 5))
        part[:, 3:].baddbmm_(x.mT, grad)
        weight.sub_(weight * 0.1 + part)

    at, x, grad = torch.tensor([0, 1, 6, 8]), torch.rand(2, 2, 3), torch.rand(2, 2, 5)
    names = run_of(step, torch.rand(2, 6, 5), at, x, grad)
    assert names == ["mul", "index_add_", "baddbmm_", "sub_"]


def test_a_sum_that_is_read_twice_stays():
    def step(weight: Tensor, x: Tensor, grad: Tensor) -> None:
        first = weight * 0.1 + torch.bmm(grad.mT, x)
        second = first + torch.bmm(grad.mT, x * 2)
        weight.sub_(second).add_(first)

    x, grad = torch.rand(2, 6, 5), torch.rand(2, 6, 4)
    names = run_of(step, torch.rand(2, 4, 5), x, grad)
    assert names.count("baddbmm_") == 1


def test_a_product_is_not_added_to_what_is_read_later():
    def step(weight: Tensor, x: Tensor, grad: Tensor) -> None:
        pull = weight * 0.1
        weight.sub_(pull + torch.bmm(grad.mT, x)).add_(pull)

    x, grad = torch.rand(2, 6, 5), torch.rand(2, 6, 4)
    assert "baddbmm_" not in run_of(step, torch.rand(2, 4, 5), x, grad)


def test_rows_that_are_hidden_are_not_computed():
    def step(total: Tensor, x: Tensor) -> None:
        mask = torch.zeros_like(x, dtype=torch.bool)
        total.add_(torch.where(mask, x.exp(), x.new_zeros(())).sum() + x.sum())

    assert run_of(step, torch.zeros(()), torch.rand(4)) == ["sum", "add", "add_"]


def test_a_part_of_what_passes_is_found_wherever_that_lies():
    table, total = torch.rand(3, 4), torch.zeros(2)
    with Tape() as tape:
        total.add_(table[0][2:])
    bind, _ = compiled(tape, Given([total], passing=[table[0]]))
    bind(total)(table[2])
    torch.testing.assert_close(total, table[0, 2:] + table[2, 2:])


def test_what_makes_other_bits_elsewhere_is_taken_apart_again(monkeypatch):
    real, asked = code.fused, []

    def wrong(calls):
        asked.append(1)
        return real(calls[:-1])  # as if a kernel added in another order

    monkeypatch.setattr(code, "fused", wrong)
    monkeypatch.setattr(replay, "HOT", 2)
    replay.RECORDINGS.found.clear()
    next(federate(fedavg.build(toys.net(), batch=4), toys.blobs(), 1))
    found = replay.RECORDINGS.found.values()
    assert asked
    assert any(r.seen > 6 and r.bind and not r.refused and not r.fuse for r in found)
    assert not any(r.refused for r in found)


def test_code_knows_what_two_tensors_of_one_storage_hold():
    table, total = torch.arange(12.0), torch.zeros(2)
    one, other = table[:4], table[6:10]
    tape = Tape()
    with tape:
        total.add_(one[1:3] * other[2:])
    bind, _ = compiled(tape, Given([total], passing=[one, other]))
    total.zero_()
    bind(total)(table[8:], table[2:6])  # the other way round, and as far apart as never before
    assert total.tolist() == [9 * 4, 10 * 5]
    with Tape() as tape:
        total.add_(table[5:7])  # which is of neither
    with pytest.raises(NotRecorded):
        compiled(tape, Given([total], passing=[one, other]))
