"""Generated code: what it computes once, what it leaves out, and how it finds parts of tensors."""

from __future__ import annotations

import pytest
import torch

from pyrofl.inference.recording.code import Given, compiled
from pyrofl.inference.recording.tape import NotRecorded, Tape


def test_what_no_step_changes_is_made_once():
    x, scale, other, total = torch.rand(3), torch.rand(3), torch.rand(3), torch.zeros(3)
    tape = Tape()
    with tape:
        total.add_(x * scale.exp().square() + other.exp())
    bind, _ = compiled(tape, Given([total], [other], [scale], [x]))
    with Tape() as once:
        run = bind(total, other, scale)
    other.mul_(2)  # as another step does
    with Tape() as always:
        run(x)
    names = [[call.op._schema.name[6:] for call in some.calls] for some in (once, always)]
    assert {"exp", "pow"} <= {*names[0]}
    assert names[1] == ["mul", "exp", "add", "add_"]
    expected = x * scale.exp().square() * 2 + (other / 2).exp() + other.exp()
    torch.testing.assert_close(total, expected)


def test_what_no_result_depends_on_is_left_out():
    x, total = torch.rand(3), torch.zeros(3)
    with Tape() as tape:
        x.exp()
        total.add_(x)
    bind, _ = compiled(tape, Given([total], passing=[x]))
    run = bind(total)
    with Tape() as again:
        run(x)
    assert [call.op._schema.name for call in again.calls] == ["aten::add_"]


def test_memory_that_is_written_into_begins_as_it_did():
    x, total = torch.rand(4), torch.zeros(4)
    with Tape() as tape:
        total.add_(x.new_zeros(4).add_(x) + torch.empty_like(x).copy_(x))
    bind, _ = compiled(tape, Given([total], passing=[x]))
    run = bind(total.zero_())
    for times in (1, 2):
        run(x)
        torch.testing.assert_close(total, 2 * times * x)


def test_the_code_of_another_shape_is_the_same():
    def code(rows: int) -> object:
        x, total = torch.rand(rows, 3), torch.zeros(3)
        with Tape() as tape:
            total.add_(x.T[1].sum() * 0.5 * rows)
        return compiled(tape, Given([total], passing=[x]))[1]

    assert code(4) == code(7)


def test_a_part_of_what_passes_is_found_wherever_that_lies():
    table, total = torch.rand(3, 4), torch.zeros(2)
    with Tape() as tape:
        total.add_(table[0][2:])
    bind, _ = compiled(tape, Given([total], passing=[table[0]]))
    bind(total)(table[2])
    torch.testing.assert_close(total, table[0, 2:] + table[2, 2:])


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
