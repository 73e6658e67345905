"""What a function does to tensors, recorded once and compiled to straight code without its Python.

The code runs the same kernels on the same layouts in the same order, so its numbers are the same to
the last bit. Views are not recorded: a view is its storage seen by size and stride, whoever made
it. What depends on no given tensor is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
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
        return list(_tensors(self.out))

    def read(self) -> list[Tensor]:
        """Return the tensors that went in."""
        return list(_tensors((self.args, self.options)))

    def written(self) -> list[Tensor]:
        """Return the tensors that it wrote into."""
        found: list[Tensor] = []
        for i, argument in enumerate(self.op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[i] if i < len(self.args) else self.options.get(argument.name)
                found += _tensors(value)
        return found


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
        by_mask = any(v.dtype == torch.bool for v in call.read()[1:])
        if by_mask if "index" in op.__name__ else UNKNOWN & set(op.tags):
            self.odd = self.odd or str(op)
        self.calls.append(call)
        return out


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


def compiled(tape: Tape, moving: Sequence[Tensor], given: Sequence[Tensor]) -> Callable[..., Any]:
    """Return a function of tensors like these, that writes into the moving ones as a tape has it.

    Raises:
        NotRecorded: if that does not follow from the tensors.
    """
    if tape.odd:
        raise NotRecorded(tape.odd)
    code = _Code([*moving, *given])
    for call in _needed(tape.calls, moving, given):
        code.add(call)
    return code.done()


def _needed(calls: list[Call], moving: Sequence[Tensor], given: Sequence[Tensor]) -> list[Call]:
    """Return the calls that depend on what is given, and that what moves depends on."""
    live = {_storage(v) for v in moving}
    fresh = {_storage(v) for call in calls for v in call.made()}
    written = {_storage(v) for call in calls for v in call.written()}
    known = live | {_storage(v) for v in given}
    if written - live - (fresh - known):
        raise NotRecorded("something else is written into")
    depends, found = known | written, []
    for call in calls:
        made = {_storage(v) for v in call.made()}
        if depends & (made | {_storage(v) for v in call.read()}):
            depends |= made
            found.append(call)
    needed = []
    for call in reversed(found):
        read = {_storage(v) for v in call.read()}
        made = {_storage(v) for v in call.made()} - read
        if live & (made | {_storage(v) for v in call.written()}):
            live |= read
            needed.append(call)
    return needed[::-1]


class _Code:
    """A graph of calls, whose nodes are found by storage, offset, size and stride."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.graph = fx.Graph()
        self.constants: list[Tensor] = []
        self.nodes: dict[Any, fx.Node] = {}
        self.roots: dict[int, tuple[fx.Node, int, torch.dtype]] = {}  # storage -> whole, its offset
        for i, value in enumerate(given):
            self._know(value, self.graph.placeholder(f"given_{i}"))

    def _know(self, value: Tensor, node: fx.Node) -> None:
        self.nodes.setdefault(_seen(value), node)
        whole = node, int(value.storage_offset()), value.dtype
        self.roots.setdefault(_storage(value), whole)

    def add(self, call: Call) -> None:
        """Add a call, unless it makes only views."""
        read, made = {_storage(v) for v in call.read()}, call.made()
        writes = bool(call.written())
        if not writes and all(_storage(v) in read for v in made):
            return
        args, options = self._named(call.args), self._named(call.options)
        if writes and (name := _name(call)).endswith("_") and hasattr(torch.Tensor, name):
            node = self.graph.call_method(name, args, options)
        else:
            node = self.graph.call_function(_quick(call), args, options)
        if isinstance(call.out, Tensor):
            self._know(call.out, node) if _storage(call.out) not in read else None
            return
        for i, value in enumerate(made):
            if _storage(value) not in read:
                self._know(value, self.graph.call_function(_item, (node, i)))

    def done(self) -> Callable[..., Any]:
        """Compile."""
        self.graph.output(None)
        run, constants = fx.GraphModule({}, self.graph).forward, self.constants
        return lambda *given: run(*given, *constants)

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._named, value))
        if isinstance(value, dict):
            return {n: self._named(v) for n, v in value.items()}
        return value

    def _node(self, value: Tensor) -> fx.Node:
        """Return what stands for a tensor: known, a view of what is known, or a constant."""
        seen = _seen(value)
        if seen not in self.nodes:
            self.nodes[seen] = self._new(value)
        return self.nodes[seen]

    def _new(self, value: Tensor) -> fx.Node:
        if (storage := _storage(value)) not in self.roots:
            self.constants.append(value.detach())
            return self.graph.placeholder(f"constant_{len(self.constants)}")
        root, begin, dtype = self.roots[storage]
        if value.dtype != dtype or value.is_conj() or value.is_neg():
            raise NotRecorded("a tensor seen as one of another type")
        offset = value.storage_offset()
        if begin and offset != begin:
            raise NotRecorded("a part of a tensor that is itself a part")
        where = () if offset == begin else (offset,)
        shape = list(value.shape), list(value.stride())
        return self.graph.call_function(torch.as_strided, (root, *shape, *where))


def _item(values: Any, i: int) -> Any:
    return values[i]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _seen(value: Tensor) -> tuple[Any, ...]:
    """Tell how a storage is seen: what is alike in all of this is the same tensor."""
    return _storage(value), value.storage_offset(), value.shape, value.stride(), value.dtype


def _name(call: Call) -> str:
    return str(call.op._schema.name).rpartition("::")[2]


def _quick(call: Call) -> Callable[..., Any]:
    """Return the function of torch that runs an operation, which is quicker to call."""
    quick = getattr(torch, _name(call), None)
    return quick if isinstance(quick, BuiltinFunctionType) else call.op
