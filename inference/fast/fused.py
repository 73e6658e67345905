"""Operations of a recording that become one, with the same bits as far as kernels are simple.

That is so for products of few terms, whose sum a kernel adds to what is there at the end, and for
SGD without momentum. Whoever uses them looks whether the bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyrofl.inference.fast.kernels import OPS, name_of
from pyrofl.inference.fast.tape import Call, Touches, storage_of, touches

FEW = 128  # terms of a product's sums, which kernels do not split


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


@dataclass
class _Sums:
    """Products [C, a, b] that are added to what nobody reads any more, in its memory."""

    calls: list[Touches]

    def done(self) -> list[Touches]:
        """Return the calls."""
        calls = self.calls[:]
        self.reads: dict[int, list[int]] = defaultdict(list)
        self.makes = {v: i for i, one in enumerate(calls) for v in one.made - one.read}
        for i, one in enumerate(calls):
            for v in one.read | one.written:
                self.reads[v].append(i)
        gone: set[int] = set()
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for i, one in enumerate(calls):
            call = calls[i] = touches(_elsewhere(one.call, moved)) if moved else one
            found = self._found(i, call.call)
            if found is None:
                continue
            product, base = found
            made = self.calls[product].call
            target = _seen_as(base, made.out)
            calls[i] = touches(Call(OPS.baddbmm_.default, (target, *made.args), {}, target))
            moved[storage_of(call.call.out)] = call.call.out, base
            gone.add(product)
        return [one for i, one in enumerate(calls) if i not in gone]

    def _found(self, at: int, call: Call) -> tuple[int, Tensor] | None:
        """Return which product a call adds to what, if that can be done in place."""
        if str(call.op) != "aten.add.Tensor" or call.options or len(call.args) != 2:
            return None
        if not all(isinstance(v, Tensor) for v in call.args):
            return None
        for base, other in (call.args, call.args[::-1]):
            product = self.makes.get(storage_of(other), at)
            if product < at and self._may(at, product, base, other, call.out):
                return product, base
        return None

    def _may(self, at: int, product: int, base: Tensor, other: Tensor, out: Tensor) -> bool:
        one = self.calls[product]
        if name_of(one.call) != "bmm" or one.call.args[0].shape[2] > FEW:
            return False
        lies = _lies(one.call.out)
        if not lies == _lies(other) == _lies(base) == _lies(out) or base.dtype != other.dtype:
            return False
        home = storage_of(base)
        if home not in self.makes or self.reads[storage_of(other)] != [at]:
            return False
        if any(self.calls[i].written & (one.read | {home}) for i in range(product + 1, at)):
            return False
        after = (v for i in self.reads[home] if i > at for v in self.calls[i].call.read())
        return not any(storage_of(v) == home and _overlap(v, base) for v in after)


def _lies(value: Tensor) -> list[tuple[int, int]]:
    """Tell how a tensor lies in memory; axes of one entry are nowhere."""
    return [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (first, last) = map(_reach, (one, other))
    return begin < last and first < end


def _reach(value: Tensor) -> tuple[int, int]:
    begin = int(value.storage_offset())
    far = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return begin, begin + far + 1


def _seen_as(value: Tensor, like: Tensor) -> Tensor:
    """See a tensor with the shape of one that lies as it does."""
    return value.as_strided(like.shape, like.stride(), value.storage_offset())


Moved = Mapping[int, tuple[Tensor, Tensor]]
"""Storage of a tensor -> it, and what has its numbers now."""


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
