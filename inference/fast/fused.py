"""Operations of a recording that become one, with the same bits as far as kernels are simple.

That is so for products of few terms, whose sum a kernel adds to what is there at the end, and for
SGD without momentum. Whoever uses them looks whether the bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyrofl.inference.fast.kernels import OPS, ZEROS, name_of
from pyrofl.inference.fast.tape import Call, Touches, reach, storage_of, touches

FEW = 128  # terms of a product's sums, which kernels do not split


Moved = Mapping[int, tuple[Tensor, Tensor]]
"""Storage of a tensor -> it, and what has its numbers now."""


def fused(calls: list[Touches]) -> list[Touches]:
    """Return calls that do the same, some in place of two or of a slower one."""
    return [touches(_plain_sgd(one.call)) for one in _Sums(calls).done()]


def _plain_sgd(call: Call) -> Call:
    """Write a step of SGD that is no more than a sum as one."""
    if name_of(call) != "_fused_sgd_" or len(call.args) != 3 or len(call.args[2]):
        return call
    told = call.options
    if any(told.get(n) for n in ("weight_decay", "momentum", "maximize", "grad_scale")):
        return call
    if told.get("found_inf") is not None:
        return call
    return Call(OPS._foreach_add_.List, call.args[:2], {"alpha": -told["lr"]}, None)


class _Sums:
    """Products, and what is gathered from zeros, that are added to what nobody reads any more."""

    def __init__(self, calls: list[Touches]) -> None:
        self.calls = calls
        self.users: dict[int, list[int]] = defaultdict(list)  # of a storage
        self.makes = {v: i for i, one in enumerate(calls) for v in one.made - one.read}
        for i, one in enumerate(calls):
            for v in one.read | one.written:
                self.users[v].append(i)

    def done(self) -> list[Touches]:
        """Return the calls, sums in the memory of what is added to."""
        found: dict[int, list[Touches]] = {}
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for i, one in enumerate(self.calls):
            found[i] = [touches(_elsewhere(one.call, moved)) if moved else one]
            base, other = self._pair(i, one.call, moved)
            if base is None or other is None:
                continue
            parts = self._gathered(i, other) or [self.makes[storage_of(other)]]
            done = [_onto(base, other, found[k][0].call) for k in parts]
            found[i] = [touches(call) for call in done]
            moved[storage_of(one.call.out)] = one.call.out, base
            for k in (self.makes[storage_of(other)], *parts):
                found[k] = []
        return [one for some in found.values() for one in some]

    def _pair(self, at: int, call: Call, moved: Moved) -> tuple[Tensor | None, Tensor | None]:
        """Return what a call adds to, in whose memory that can be done, and what it adds."""
        if str(call.op) == "aten.add.Tensor" and not call.options and len(call.args) == 2:
            for base, other in (call.args, call.args[::-1]):
                tensors = isinstance(base, Tensor) and isinstance(other, Tensor)
                free = tensors and not {storage_of(base), storage_of(other)} & {*moved}
                if free and self._may(at, base, other, call.out):
                    return base, other
        return None, None

    def _may(self, at: int, base: Tensor, other: Tensor, out: Tensor) -> bool:
        home, product = storage_of(base), self.makes.get(storage_of(other), at)
        if home not in self.makes or product >= at or base.dtype != other.dtype:
            return False
        made = self.calls[product].call
        if not isinstance(made.out, Tensor):  # one of several outputs, as of a convolution backward
            return False
        if not _lies(made.out) == _lies(other) == _lies(base) == _lies(out):
            return False
        parts = self._gathered(at, other)
        if not parts:
            if not _is_product(made) or self.users[storage_of(other)] != [at]:
                return False
            parts = [product]
        read = {v for i in parts for v in self.calls[i].read} | {home}
        if any(self.calls[i].written & read for i in range(parts[0], at) if i not in parts):
            return False
        after = (v for i in self.users[home] if i > at for v in self.calls[i].call.read())
        return not any(storage_of(v) == home and _overlap(v, base) for v in after)

    def _gathered(self, at: int, value: Tensor) -> list[int]:
        """Return the calls that add all that there is to a tensor of zeros; none if others do."""
        home = storage_of(value)
        *parts, last = self.users[home]
        calls = [self.calls[i].call for i in parts]
        right = name_of(self.calls[self.makes[home]].call) in ZEROS and last == at
        for call in calls:
            others = {storage_of(v) for v in call.read()[1:]}
            known = name_of(call) == "index_add_" or _is_product(call)
            right = right and known and not call.options and home not in others
        return parts if right else []


def _is_product(call: Call) -> bool:
    """Say whether a call makes a product of few terms, or adds it to what is there."""
    place = {"bmm": 0, "baddbmm_": 1}.get(name_of(call))
    return place is not None and not call.options and call.args[place].shape[2] <= FEW


def _onto(base: Tensor, other: Tensor, call: Call) -> Call:
    """Let a call add to a base what it makes of, or adds to, another tensor that lies alike."""
    if name_of(call) == "bmm":
        target = base.as_strided(call.out.shape, call.out.stride(), base.storage_offset())
        return Call(OPS.baddbmm_.default, (target, *call.args), {}, target)
    part, *rest = call.args
    begin = part.storage_offset() - other.storage_offset() + base.storage_offset()
    target = base.as_strided(part.shape, part.stride(), begin)
    return Call(call.op, (target, *rest), {}, target)


def _lies(value: Tensor) -> list[tuple[int, int]]:
    """Tell how a tensor lies in memory; axes of one entry are nowhere."""
    return [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (first, last) = map(reach, (one, other))
    return begin < last and first < end


def _elsewhere(call: Call, moved: Moved) -> Call:
    """Let a call read what has moved where it is now."""

    def at(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(at, value))
        if not isinstance(value, Tensor) or storage_of(value) not in moved:
            return value
        was, now = moved[storage_of(value)]
        begin = value.storage_offset() - was.storage_offset() + now.storage_offset()
        return now.as_strided(value.shape, value.stride(), begin)

    options = {n: at(v) for n, v in call.options.items()}
    return call._replace(args=tuple(map(at, call.args)), options=options)
