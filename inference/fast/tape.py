"""What a function does to tensors, recorded once; see `code` for what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READ_BY = ("item", "tolist", "numpy", "data_ptr", "__array__", "__bool__", "__int__", "__float__")
READS = {getattr(torch.Tensor, name) for name in (*READ_BY, "__index__")}
UNKNOWN = {
    torch.Tag.nondeterministic_seeded,  # draws that are nobody's
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}


class NotRecorded(Exception):
    """A function does something that cannot be done again by its tensors alone."""


class Call(NamedTuple):
    """An operation with its tensors; these live as long as it, so no storage is used twice."""

    op: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    out: Any

    def made(self) -> list[Tensor]:
        """Return the tensors that came out."""
        return _tensors((self.out,))

    def read(self) -> list[Tensor]:
        """Return the tensors that went in."""
        return _tensors((*self.args, *self.options.values()))

    def written(self) -> list[Tensor]:
        """Return the tensors that it wrote into."""
        args, options = self.args, self.options
        known = _writes(self.op)
        return _tensors([args[i] if i < len(args) else options.get(name) for i, name in known])


@cache
def _is_odd(op: Any) -> tuple[bool, bool]:
    """Say whether an operation cannot be done again: if it picks by a mask, and in any case."""
    picks = "index" in op.__name__
    return picks, not picks and bool(UNKNOWN & {*op.tags})


@cache
def _writes(op: Any) -> list[tuple[int, str]]:
    """Return places and names of the arguments that an operation writes into."""
    known = [(i, a.name, a.alias_info) for i, a in enumerate(op._schema.arguments)]
    return [(i, name) for i, name, alias in known if alias is not None and alias.is_write]


class Tape(TorchDispatchMode):
    """Records the operations of a function."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.odd = ""  # what cannot be done again

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note it down."""
        out = op(*args, **(kwargs or {}))
        call = Call(op, args, kwargs or {}, out)
        if_masked, always = _is_odd(op)
        if always or (if_masked and any(v.dtype == torch.bool for v in call.read()[1:])):
            self.odd = self.odd or str(op)
        self.calls.append(call)
        return out


# Torch wraps it in what loads its compiler, which takes a second, once, and much of every call.
Tape.__torch_dispatch__ = unwrap(Tape.__torch_dispatch__)  # type: ignore[method-assign]


class Reads(TorchFunctionMode):
    """Notices what Python reads of a tensor's numbers, which it may decide by."""

    def __init__(self, tape: Tape) -> None:
        """Tell the tape."""
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function."""
        if func in READS:
            self.tape.odd = self.tape.odd or str(func)
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


class Touches(NamedTuple):
    """The storages that a call makes, reads and writes into."""

    call: Call
    made: set[int]
    read: set[int]
    written: set[int]


def touches(call: Call) -> Touches:
    """Return what a call touches."""
    groups = call.made(), call.read(), call.written()
    return Touches(call, *({storage_of(v) for v in some} for some in groups))


def storage_of(value: Tensor) -> int:
    """Tell a tensor's memory."""
    return int(value.untyped_storage()._cdata)


def reach(value: Tensor) -> tuple[int, int]:
    """Return a tensor's first place in its storage, and the one after its last."""
    begin = int(value.storage_offset())
    if not value.numel():
        return begin, begin
    far = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return begin, begin + far + 1
