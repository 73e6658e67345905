"""Straight code without Python's decisions, for what a function does to tensors, as `tape` has it.

The code runs the same kernels on the same layouts in the same order, so its numbers are the same to
the last bit. Views are not recorded: a view is its storage seen by size and stride, whoever made
it. What depends on no given tensor is a constant; what no step changes is made once, and so is the
memory for what every step makes, with the views of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.fast.executed import executed
from pyrofl.inference.fast.fused import fused
from pyrofl.inference.fast.kernels import (
    BY_ENTRY,
    EMPTY,
    ZEROS,
    hidden,
    is_placed,
    is_whole,
    name_of,
    quick,
    simpler,
    unchanged,
    unwrapped,
)
from pyrofl.inference.fast.tape import (
    Call,
    NotRecorded,
    Tape,
    Touches,
    reach,
    storage_of,
    touches,
)


class Given(NamedTuple):
    """The tensors that a function is given."""

    moving: Sequence[Tensor]  # it writes into them, and into nothing else
    placed: Sequence[Tensor] = ()  # others write into them between two runs
    still: Sequence[Tensor] = ()  # nobody does
    passing: Sequence[Tensor] = ()  # are others in every run

    @property
    def bound(self) -> list[Tensor]:
        """Those that are the same tensors in all runs."""
        return [*self.moving, *self.placed, *self.still]


Bind = Callable[..., Callable[..., None]]
"""(*moving, *placed, *still) -> a function of the passing tensors, which runs once for each."""


def compiled(tape: Tape, given: Given, fuse: bool = True) -> tuple[Bind, str]:
    """Return a function of tensors like these, that writes into the moving ones as a tape has it.

    What follows from the bound ones alone is computed once, when they are given. With it comes its
    code without numbers, which is alike in all shapes. If they may `fuse`, operations become one,
    or write where they are told, where that might fail or make other bits than is known here.

    Raises:
        NotRecorded: if that does not follow from the tensors.
    """
    if tape.odd:
        raise NotRecorded(tape.odd)
    calls = _needed([touches(call) for call in hidden(tape.calls)], given)
    calls = fused(calls) if fuse else calls
    code = _Code(given, {v for one in calls for v in one.written}, fuse)
    for one in calls:
        code.add(one)
    return code.done()


def _needed(calls: list[Touches], given: Given) -> list[Touches]:
    """Return the calls that depend on what is given, and that what moves depends on."""
    live = {storage_of(v) for v in given.moving}
    fresh = {v for one in calls for v in one.made}
    written = {v for one in calls for v in one.written}
    known = {storage_of(v) for some in given for v in some}
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


class Line(NamedTuple):
    """A line of Python."""

    name: str  # of its variable
    text: str  # what that is
    used: list[str]  # other variables
    over: Sequence[str] = ()  # of these, whose memory the result may take


class _Code:
    """Lines of Python, whose variables are found by storage, offset, size and stride."""

    def __init__(self, given: Given, written: set[int], place: bool) -> None:
        self.place = place  # results in memory of their own, where operations can be told where
        self.written = written  # storages that any call writes into
        self.once: list[Line] = []
        self.lines: list[Line] = []  # of every run
        self.values: dict[str, Any] = {"view": torch.as_strided, "empty": torch.empty}
        self.views: set[str] = set()  # of the variables
        self.known: dict[Any, str] = {}
        self.twins: dict[tuple[str, ...], str] = {}  # what is made of the same values
        self.roots: dict[int, list[tuple[str, Tensor]]] = {}  # storage -> what others are views of
        self.kept: dict[str, Tensor] = {}  # variables in memory of their own, of which
        self.parts: dict[str, str] = {}  # others are views
        self.laid: dict[str, object] = {}  # how variables lie in memory
        names = [[f"given_{i}_{j}" for j, _ in enumerate(some)] for i, some in enumerate(given)]
        *bound, self.passing = names
        self.bound = [name for some in bound for name in some]
        self.placed = {*self.bound}  # variables that are the same tensors in all runs,
        self.still = {*bound[-1]}  # and the same numbers
        for own, some in zip(names, given, strict=True):
            for name, value in zip(own, some, strict=True):
                self._know(value, name)

    def _know(self, value: Tensor, name: str) -> None:
        self.known.setdefault(_seen(value), name)
        self.roots.setdefault(storage_of(value), []).append((name, value))
        self.laid[name] = _lies(value)

    def add(self, one: Touches) -> None:
        """Add a call, unless it makes only views, or what is there already."""
        call = one.call
        if not one.written and one.made <= one.read:
            return
        if (simple := simpler(call)) is not None:
            for part in simple:
                self.add(touches(part))
            return
        used: list[str] = []
        pure = not one.written and not self.written & (one.made | one.read)
        args = [self._named(v, used) for v in unwrapped(call)]
        options = [f"{n}={self._named(v, used)}" for n, v in call.options.items()]
        if pure and isinstance(call.out, Tensor):
            key = (str(call.op), *args, *options)
            if (twin := self.twins.get(key) or unchanged(call, args)) is not None:
                self._know(call.out, twin)
                return
        fresh = isinstance(call.out, Tensor) and storage_of(call.out) not in one.read
        begun = self._begun(call, pure) if fresh else None
        if begun is not None:
            used.clear()
        once = pure and self.still.issuperset(used)
        if one.written and (name := name_of(call)).endswith("_") and hasattr(torch.Tensor, name):
            text = f"{args.pop(0)}.{name}({', '.join(args + options)})"
        else:
            text = begun or f"{self._constant(quick(call))}({', '.join(args + options)})"
        if fresh and not once and (begun is not None or (self.place and is_placed(call))):
            node = self._keep(call, f"{text[:-1]}, out={{}})" if begun is None else begun, used)
        else:
            node = self._line(text, used, once, once)
        if pure and isinstance(call.out, Tensor):
            self.twins[key] = node
        if isinstance(call.out, Tensor):
            self._know(call.out, node) if fresh else None
            return
        # None is where nobody asked, as for the gradient of what a first convolution reads.
        for i, value in enumerate(call.out or ()):
            if isinstance(value, Tensor) and storage_of(value) not in one.read:
                self._know(value, self._line(f"{node}[{i}]", [node], once, once))

    def _begun(self, call: Call, pure: bool) -> str | None:
        """Write how memory begins, of a call that does no more; None for another call."""
        name, out = name_of(call), call.out
        if not is_whole(out) or name not in EMPTY | ZEROS:
            return None
        if name in EMPTY:
            return ""
        return (
            f"{self._constant(torch.zeros_like)}({self._constant(out)})" if pure else "{}.zero_()"
        )

    def _keep(self, call: Call, text: str, used: list[str]) -> str:
        """Write a line whose result has memory of its own; return its variable."""
        node = f"kept_{len(self.kept)}"
        lies = _lies(call.out)
        over = [n for n in used if name_of(call) in BY_ENTRY and self.laid.get(n) == lies]
        self.lines.append(Line(node, text.format(node), [*used], over))
        self.kept[node], self.parts[node] = call.out, node
        self.placed.add(node)
        return node

    def done(self) -> tuple[Bind, str]:
        """Compile; a variable is forgotten where it is used last, so that its memory serves on."""
        lines = list(self._with_views_in_place())
        last = {name: i for i, line in enumerate(lines) for name in line.used}
        body = []
        for i, (name, text, used, _) in enumerate(lines):
            over = [n for n in {*used} if last[n] == i and n[:5] == "made_"]
            known = f"{name} = " if name in last and name[:5] == "made_" else ""
            body += [f"  {known}{text}"] if text else []
            body += [f"  del {', '.join(sorted(over))}"] if over else []
        memory, once = (
            [f" {one.name} = {one.text}" for one in some] for some in (self._memory(), self.once)
        )
        bind, run = f"def bind({', '.join(self.bound)}):", f" def run({', '.join(self.passing)}):"
        code = "\n".join([bind, *memory, *once, run, *body, "  return", " return run"])
        values = executed(code, self.values)
        return values["bind"], re.sub(r"\d+", "", "\n".join([*once, *body]))

    def _memory(self) -> Iterator[Line]:
        """Give results memory, that of others which nobody reads any more where there is some."""
        read = [[self.parts[n] for n in (x.name, *x.used) if n in self.parts] for x in self.lines]
        last = {name: i for i, names in enumerate(read) for name in names}
        homes: dict[str, str] = {}
        free: dict[object, list[str]] = {}
        blocks = 0
        for i, (line, names) in enumerate(zip(self.lines, read, strict=True)):
            over = [self.parts[n] for n in line.over if n in self.parts]
            if (out := self.kept.get(line.name)) is not None:
                kind = out.numel(), out.dtype, out.device
                taken = [n for n in over if last[n] == i and names.count(n) == 1]
                if taken:
                    homes[line.name] = homes.pop(taken[0])
                elif free.get(kind):
                    homes[line.name] = free[kind].pop()
                else:
                    homes[line.name], blocks = f"block_{blocks}", blocks + 1
                    options = (
                        f"dtype={self._constant(out.dtype)}, device={self._constant(out.device)}"
                    )
                    yield Line(homes[line.name], f"empty({out.numel()}, {options})", [])
                where = f"{homes[line.name]}, {tuple(out.shape)}, {tuple(out.stride())}"
                yield Line(line.name, f"view({where})", [])
            for name in dict.fromkeys(n for n in names if last[n] == i and n in homes):
                value = self.kept[name]
                kind = value.numel(), value.dtype, value.device
                free.setdefault(kind, []).append(homes.pop(name))

    def _with_views_in_place(self) -> Iterator[Line]:
        """Write a view that is used once where it is used."""
        times = Counter(name for line in self.lines for name in line.used)
        views: dict[str, Line] = {}
        for name, text, used, _ in self.lines:
            for one in [n for n in used if n in views]:
                shown = views[one]
                text = re.sub(rf"\b{one}\b", shown.text, text)
                used = [*(n for n in used if n != one), *shown.used]
            line = Line(name, text, used)
            if name in self.views and times[name] == 1:
                views[name] = line
            else:
                yield line

    def _line(self, text: str, used: list[str], once: bool = False, still: bool = False) -> str:
        """Write a line that runs once or always, for a value that is `still` the same then."""
        lines = self.once if once else self.lines
        name = f"{'once' if once else 'made'}_{len(lines)}"
        lines.append(Line(name, text, used))
        self.placed |= {name} if once else set()
        self.still |= {name} if still else set()
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
            own: list[str] = []
            text = f"[{', '.join(self._named(v, own) for v in value)}]"
            if own and self.placed.issuperset(own):
                return self._line(text, own, once=True, still=False)
            used += own
            return text
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
        if (storage := storage_of(value)) not in self.roots:
            name = self._constant(value.detach())
            self.placed.add(name)
            self.still.add(name)
            return name
        roots = [one for one in self.roots[storage] if _holds(one[1], value)]
        if not roots or value.is_conj() or value.is_neg():
            raise NotRecorded("a tensor that is no part of another, or one of another type")
        root, whole = roots[0]
        apart = value.storage_offset() - whole.storage_offset()
        where = f", {root}.storage_offset() + {apart}" if apart else ""
        shape = f"{tuple(value.shape)}, {tuple(value.stride())}"
        once, still = root in self.placed, root in self.still
        view = self._line(f"view({root}, {shape}{where})", [root], once, still)
        self.views.add(view)
        self.laid[view] = _lies(value)
        if root in self.parts:
            self.parts[view] = self.parts[root]
        return view


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Say whether one of two tensors of the same storage has all numbers of the other."""
    (begin, end), (first, last) = map(reach, (whole, part))
    return whole.dtype == part.dtype and begin <= first and last <= end


def _lies(value: Tensor) -> object:
    return value.shape, value.stride(), value.dtype, value.device


def _seen(value: Tensor) -> tuple[Any, ...]:
    """Tell how a storage is seen: what is alike in all of this is the same tensor."""
    return storage_of(value), value.storage_offset(), value.shape, value.stride(), value.dtype
