"""Which function of torch runs an operation in the least time, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from pyrofl.inference.fast.tape import Call, storage_of

# Operations that write where they are told, those by entries also over what they read.
BY_ENTRY = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "where", "addcmul"),
    *("sigmoid", "tanh", "clamp", "clamp_min", "reciprocal", "log1p", "expm1", "abs", "le"),
}
PLACED = {
    *("sum", "gather", "scatter_add", "_log_softmax", "_log_softmax_backward_data", "_softmax"),
    *("bmm", "baddbmm", "mm", "addmm", "index_select", "linalg_vector_norm", "cat"),
}
UNTOLD = {"aten.sum.default", *(f"aten.where.Scalar{n}" for n in ("", "Other", "Self"))}
FEW = 2**14  # zeros that a recording holds on to
EMPTY = {"empty", "new_empty", "empty_like"}
ZEROS = {"new_zeros", "zeros_like"}
OPS = torch.ops.aten
NUMBERS = {"add", "sub", "mul", "div", "le"}  # quicker with a tensor than with a number of Python


def is_whole(value: Tensor) -> bool:
    """Say whether a tensor is all that is in its memory."""
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def is_placed(call: Call) -> bool:
    """Say whether an operation writes where it is told."""
    known = name_of(call) in BY_ENTRY | PLACED and str(call.op) not in UNTOLD
    return known and "out" not in call.options and is_whole(call.out)


def hidden(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield calls; those that make zeros whatever they are given, as of masked rows, with none."""
    calls = list(calls)
    written, zeros = {storage_of(v) for call in calls for v in call.written()}, set[int]()
    for call in calls:
        name, out = name_of(call), call.out
        known = name in ZEROS
        if name == "where" and len(call.args) == 3:
            condition, _, other = call.args
            tensors = isinstance(condition, Tensor) and isinstance(other, Tensor)
            known = tensors and {storage_of(condition), storage_of(other)} <= zeros
        if known and storage_of(out) not in written and out.numel() <= FEW:
            zeros.add(storage_of(out))
            call = Call(OPS.new_zeros.default, (), {}, out)
        yield call


def unchanged(call: Call, args: list[str]) -> str | None:
    """Return what a call multiplies by one, and so makes again with the same bits."""
    if name_of(call) != "mul" or type(call.args[1]) is not float or call.args[1] != 1:
        return None
    one, out = call.args[0], call.out
    alike = one.shape == out.shape and one.stride() == out.stride() and one.dtype == out.dtype
    return args[0] if alike else None


def simpler(call: Call) -> list[Call] | None:
    """Write an operation that cannot be told where to write as others that make the same bits."""
    name, args, out = name_of(call), call.args, call.out
    if name == "relu":
        return [Call(OPS.clamp_min.default, (args[0], 0), {}, out)]
    if name == "threshold_backward":
        grad, value, least = args
        below = torch.empty_like(out, dtype=torch.bool)
        zero = torch.zeros((), dtype=out.dtype, device=out.device)
        test = Call(OPS.le.Scalar, (value, least), {}, below)
        return [test, Call(OPS.where.self, (below, zero, grad), {}, out)]
    return None


def unwrapped(call: Call) -> tuple[Any, ...]:
    """Return the arguments, a number beside a tensor as what torch makes of it: a tensor."""
    args = call.args
    if name_of(call) not in NUMBERS or len(args) < 2 or type(args[1]) not in (int, float):
        return args
    one = args[0]
    if not isinstance(one, Tensor) or not one.dim() or not one.is_floating_point():
        return args
    return one, _number(args[1]), *args[2:]


@lru_cache(maxsize=256)
def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def name_of(call: Call) -> str:
    """Return the name of an operation."""
    return str(call.op._schema.name).rpartition("::")[2]


def quick(call: Call) -> Callable[..., Any]:
    """Return the function of torch that runs an operation, which is quicker to call."""
    name = name_of(call)
    quick = getattr(torch, name, None) or getattr(torch.linalg, name.removeprefix("linalg_"), None)
    return quick if isinstance(quick, BuiltinFunctionType) else call.op
