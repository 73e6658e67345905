"""What a function does to tensors, recorded once and compiled to straight code without its Python.

The code runs the same kernels on the same layouts in the same order, so its numbers are the same to
the last bit. Views are not recorded: a view is its storage seen by size and stride, whoever made
it. What depends on no given tensor is a constant.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from inspect import unwrap
from math import isfinite
from types import BuiltinFunctionType, CodeType
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
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
NUMBERS = re.compile(  # also several, as sizes and strides are
    rf"(?<!\w)(?:\((?:{NUMBER}, ?)+(?:{NUMBER})?\)|\[(?:{NUMBER}, )*{NUMBER}\]|{NUMBER})(?![\w.])"
)


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


def compiled(
    tape: Tape, moving: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[Callable[..., Any], str]:
    """Return a function of tensors like these, that writes into the moving ones as a tape has it.

    With it comes its code, which is alike in all shapes, as numbers have names in it.

    Raises:
        NotRecorded: if that does not follow from the tensors.
    """
    if tape.odd:
        raise NotRecorded(tape.odd)
    calls = _needed([_touches(call) for call in tape.calls], moving, given)
    code = _Code([*moving, *given], {v for one in calls for v in one.written})
    for one in calls:
        code.add(one)
    return code.done()


class Touches(NamedTuple):
    """The storages that a call makes, reads and writes into."""

    call: Call
    made: set[int]
    read: set[int]
    written: set[int]


def _touches(call: Call) -> Touches:
    groups = call.made(), call.read(), call.written()
    return Touches(call, *({_storage(v) for v in some} for some in groups))


def _needed(
    calls: list[Touches], moving: Sequence[Tensor], given: Sequence[Tensor]
) -> list[Touches]:
    """Return the calls that depend on what is given, and that what moves depends on."""
    live = {_storage(v) for v in moving}
    fresh = {v for one in calls for v in one.made}
    written = {v for one in calls for v in one.written}
    known = live | {_storage(v) for v in given}
    if written - live - (fresh - known):
        raise NotRecorded("something else is written into")
    depends, found = known | written, []
    for one in calls:
        if depends & (one.made | one.read):
            depends |= one.made
            found.append(one)
    needed = []
    for one in reversed(found):
        if live & ((one.made - one.read) | one.written):
            live |= one.read
            needed.append(one)
    return needed[::-1]


@lru_cache(maxsize=256)
def _executable(code: str) -> CodeType:
    """Compile code, which takes longer than all else where it is not known from another shape."""
    return compile(code, "<recording>", "exec")


class _Code:
    """Lines of Python, whose variables are found by storage, offset, size and stride."""

    def __init__(self, given: Sequence[Tensor], written: set[int]) -> None:
        self.written = written  # storages that any call writes into
        self.lines: list[tuple[str, str, list[str]]] = []  # variable, what it is, of which others
        self.values: dict[str, Any] = {}  # that the code names
        self.views: set[str] = set()  # of the variables
        self.known: dict[Any, str] = {}
        self.twins: dict[tuple[str, ...], str] = {}  # what is made of the same values
        self.roots: dict[
            int, list[tuple[str, Tensor]]
        ] = {}  # storage -> what others may be views of
        self.given = [f"given_{i}" for i in range(len(given))]
        for name, value in zip(self.given, given, strict=True):
            self._know(value, name)

    def _know(self, value: Tensor, name: str) -> None:
        self.known.setdefault(_seen(value), name)
        self.roots.setdefault(_storage(value), []).append((name, value))

    def add(self, one: Touches) -> None:
        """Add a call, unless it makes only views, or what is there already."""
        call, made = one.call, one.call.made()
        if not one.written and one.made <= one.read:
            return
        used: list[str] = []
        args = [self._named(v, used) for v in call.args]
        options = [f"{n}={self._named(v, used)}" for n, v in call.options.items()]
        pure = not one.written and not self.written & (one.made | one.read)
        if pure and isinstance(call.out, Tensor):
            key = (str(call.op), *args, *options)
            if (twin := self.twins.get(key) or _unchanged(call, args)) is not None:
                self._know(call.out, twin)
                return
        if one.written and (name := _name(call)).endswith("_") and hasattr(torch.Tensor, name):
            text = f"{args.pop(0)}.{name}"
        else:
            text = self._constant(_quick(call))
        node = self._line(f"{text}({', '.join(args + options)})", used)
        if pure and isinstance(call.out, Tensor):
            self.twins[key] = node
        if isinstance(call.out, Tensor):
            self._know(call.out, node) if _storage(call.out) not in one.read else None
            return
        for i, value in enumerate(made):
            if _storage(value) not in one.read:
                self._know(value, self._line(f"{node}[{i}]", [node]))

    def done(self) -> tuple[Callable[..., Any], str]:
        """Compile; a variable is forgotten where it is used last, so that its memory serves on."""
        lines = list(self._with_views_in_place())
        last = {name: i for i, (_, _, used) in enumerate(lines) for name in used}
        body = []
        for i, (name, text, used) in enumerate(lines):
            over = [n for n in {*used} if last[n] == i and n[:5] == "made_"]
            body.append(f" {name} = {text}" if name in last else f" {text}")
            body += [f" del {', '.join(sorted(over))}"] if over else []
        code = "\n".join([f"def run({', '.join(self.given)}):", *body, " return"])
        values = dict(self.values)

        def named(numbers: re.Match[str]) -> str:
            name = f"number_{len(values)}"
            values[name] = _read(numbers[0])
            return name

        code = NUMBERS.sub(named, code)
        exec(_executable(code), values)
        return values["run"], code

    def _with_views_in_place(self) -> Iterator[tuple[str, str, list[str]]]:
        """Write a view that is used once where it is used."""
        times = Counter(name for _, _, used in self.lines for name in used)
        views: dict[str, tuple[str, list[str]]] = {}
        for name, text, used in self.lines:
            for one in [n for n in used if n in views]:
                shown, of = views[one]
                text = re.sub(rf"\b{one}\b", shown, text)
                used = [*(n for n in used if n != one), *of]
            if name in self.views and times[name] == 1:
                views[name] = text, used
            else:
                yield name, text, used

    def _line(self, text: str, used: list[str]) -> str:
        name = f"made_{len(self.lines)}"
        self.lines.append((name, text, used))
        return name

    def _constant(self, value: Any) -> str:
        if type(value) in (bool, int, type(None)):
            return repr(value)
        name = f"constant_{len(self.values)}"
        self.values[name] = value
        return name

    def _named(self, value: Any, used: list[str]) -> str:
        """Write an argument; `used` takes the variables that are in it."""
        if isinstance(value, Tensor):
            used.append(self._node(value))
            return used[-1]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._named(v, used) for v in value)}]"
        if type(value) is float and isfinite(value):
            return repr(value)
        return self._constant(value)

    def _node(self, value: Tensor) -> str:
        """Return what stands for a tensor: known, a view of what is known, or a constant."""
        seen = _seen(value)
        if seen not in self.known:
            self.known[seen] = self._new(value)
        return self.known[seen]

    def _new(self, value: Tensor) -> str:
        if (storage := _storage(value)) not in self.roots:
            return self._constant(value.detach())
        roots = [one for one in self.roots[storage] if _holds(one[1], value)]
        if not roots or value.is_conj() or value.is_neg():
            raise NotRecorded("a tensor that is no part of another, or one of another type")
        root, whole = roots[0]
        apart = value.storage_offset() - whole.storage_offset()
        where = f", {root}.storage_offset() + {apart}" if apart else ""
        shape = f"{tuple(value.shape)}, {tuple(value.stride())}"
        self.values["view"] = torch.as_strided
        view = self._line(f"view({root}, {shape}{where})", [root])
        self.views.add(view)
        return view


def _read(text: str) -> Any:
    """Read what `NUMBERS` found."""
    if text[0] not in "([":
        return float(text) if {".", "e"} & {*text} else int(text)
    found = [_read(part) for part in text[1:-1].replace(",", " ").split()]
    return tuple(found) if text[0] == "(" else found


def _unchanged(call: Call, args: list[str]) -> str | None:
    """Return what a call multiplies by one, and so makes again with the same bits."""
    if _name(call) != "mul" or type(call.args[1]) is not float or call.args[1] != 1:
        return None
    one, out = call.args[0], call.out
    return args[0] if _seen(one)[2:] == _seen(out)[2:] else None  # it lies alike


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _storage(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Say whether one of two tensors of the same storage has all numbers of the other."""
    (begin, end), (first, last) = map(_reach, (whole, part))
    return whole.dtype == part.dtype and begin <= first and last <= end


def _reach(value: Tensor) -> tuple[int, int]:
    """Return the first and the last place of a tensor in its storage."""
    begin = int(value.storage_offset())
    far = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True) if n)
    return begin, begin + far


def _seen(value: Tensor) -> tuple[Any, ...]:
    """Tell how a storage is seen: what is alike in all of this is the same tensor."""
    return _storage(value), value.storage_offset(), value.shape, value.stride(), value.dtype


def _name(call: Call) -> str:
    return str(call.op._schema.name).rpartition("::")[2]


def _quick(call: Call) -> Callable[..., Any]:
    """Return the function of torch that runs an operation, which is quicker to call."""
    quick = getattr(torch, _name(call), None)
    return quick if isinstance(quick, BuiltinFunctionType) else call.op
