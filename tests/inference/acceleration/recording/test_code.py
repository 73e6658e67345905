"""Generated code: what it computes once, what it leaves out, and how it finds parts of tensors."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from pyrofl.inference.acceleration.recording.code import RecordingInputs, compile_operations
from pyrofl.inference.acceleration.recording.tape import NotRecorded, Tape

MAKES = (
    lambda one, two: one - two,
    lambda one, two: one * two.T,
    lambda one, two: one * 1.0,
    lambda one, two: one.neg() + one.T,
    lambda one, two: torch.where(one > 0, one, two),
    lambda one, two: one.view(-1)[4:8].view(2, 2).repeat(2, 2),
    lambda one, two: one @ two / 4,
    lambda one, two: torch.cat([one[:2], two[2:]]).tanh(),
    lambda one, two: one.clone().add_(two),
    lambda one, two: one.T.contiguous().div(two.abs() + 1),
)


def test_what_no_step_changes_is_made_once():
    x, scale, other, total = torch.rand(3), torch.rand(3), torch.rand(3), torch.zeros(3)
    tape = Tape()
    with tape:
        total.add_(x * scale.exp().square() + other.exp())
    bind, _ = compile_operations(tape, RecordingInputs([total], [other], [scale], [x]))
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
    bind, _ = compile_operations(tape, RecordingInputs([total], passing=[x]))
    run = bind(total)
    with Tape() as again:
        run(x)
    assert [call.op._schema.name for call in again.calls] == ["aten::add_"]


def test_memory_that_is_written_into_begins_as_it_did():
    x, total = torch.rand(4), torch.zeros(4)
    with Tape() as tape:
        total.add_(x.new_zeros(4).add_(x) + torch.empty_like(x).copy_(x))
    bind, _ = compile_operations(tape, RecordingInputs([total], passing=[x]))
    run = bind(total.zero_())
    for times in (1, 2):
        run(x)
        torch.testing.assert_close(total, 2 * times * x)


def test_the_code_of_another_shape_is_the_same():
    def code(rows: int) -> object:
        x, total = torch.rand(rows, 3), torch.zeros(3)
        with Tape() as tape:
            total.add_(x.T[1].sum() * 0.5 * rows)
        return compile_operations(tape, RecordingInputs([total], passing=[x]))[1]

    assert code(4) == code(7)


def test_a_part_of_what_passes_is_found_wherever_that_lies():
    table, total = torch.rand(3, 4), torch.zeros(2)
    with Tape() as tape:
        total.add_(table[0][2:])
    bind, _ = compile_operations(tape, RecordingInputs([total], passing=[table[0]]))
    bind(total)(table[2])
    torch.testing.assert_close(total, table[0, 2:] + table[2, 2:])


def test_code_knows_what_two_tensors_of_one_storage_hold():
    table, total = torch.arange(12.0), torch.zeros(2)
    one, other = table[:4], table[6:10]
    tape = Tape()
    with tape:
        total.add_(one[1:3] * other[2:])
    bind, _ = compile_operations(tape, RecordingInputs([total], passing=[one, other]))
    total.zero_()
    bind(total)(table[8:], table[2:6])  # the other way round, and as far apart as never before
    assert total.tolist() == [9 * 4, 10 * 5]
    with Tape() as tape:
        total.add_(table[5:7])  # which is of neither
    with pytest.raises(NotRecorded):
        compile_operations(tape, RecordingInputs([total], passing=[one, other]))


def test_results_take_the_place_of_arguments_that_are_not_read_again():
    x, total = torch.rand(3), torch.zeros(3)
    with Tape() as tape:
        total.add_(((x - 1).exp() * 2).neg())
    _, (_, lines) = compile_operations(tape, RecordingInputs([total], passing=[x]))
    first, *rest, _ = lines
    homes = {dict(line.options)["out"] for line in (first, *rest)}
    assert len(rest) == 3
    assert len(homes) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_that_share_memory_give_the_same_numbers(seed: int):
    choose = random.Random(seed)

    def program(x: Tensor, total: Tensor) -> None:
        values = [x + 1, x.exp()]
        for _ in range(12):
            one, two = choose.choice(values), choose.choice(values)
            values.append(choose.choice(MAKES)(one, two))
            values = values[-4:]
        total.add_(sum(values))

    x, total, expected = torch.randn(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    with Tape() as tape:
        program(x, total)
    bind, _ = compile_operations(tape, RecordingInputs([total], passing=[x]))
    run = bind(total.zero_())
    for _ in range(2):
        x = torch.randn(4, 4)
        choose.seed(seed)
        program(x, expected)
        run(x)
        assert torch.equal(total, expected)
