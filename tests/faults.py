"""Faults to inject: messages, sizes and rows that are wrong for some clients, in any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.tensors import Tensors, pick

ID = "fault/id"
Poison = Callable[[Tensors, Tensor], Tensors]
"""(message [C, *p], bad [C]) -> the message as it arrives."""


def corrupted(method: Method, poison: Poison, *ids: int) -> Method:
    """Let a poison loose on what some clients upload; the rest of the method is as it was."""

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return method.init_client(received, cohort, generator) | {ID: cohort.ids.to(torch.float64)}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        plain = {n: v for n, v in local.items() if n != ID}
        return poison(
            method.upload(received, plain), torch.isin(local[ID].long(), torch.tensor(ids))
        )

    return replace(method, init_client=init_client, upload=upload)


def entry(value: float, patterns: str = "*") -> Poison:
    """Put a number into the last entry of the first tensor whose name matches."""

    def poison(message: Tensors, bad: Tensor) -> Tensors:
        suits = [
            n for n, v in pick(message, patterns).items() if v.is_floating_point() or value == -1
        ]
        name, tensor = suits[0], message[suits[0]]
        spoilt = tensor.clone(memory_format=torch.contiguous_format)
        spoilt.reshape(len(bad), -1)[bad, -1] = value
        return message | {name: spoilt}

    return poison


def whole(change: Callable[[Tensor], Tensor]) -> Poison:
    """Change the form of the first tensor, where a bad client is on its own."""

    def poison(message: Tensors, bad: Tensor) -> Tensors:
        name, tensor = next(iter(message.items()))
        return message | {name: change(tensor)} if bool(bad.all()) else message

    return poison


def missing(message: Tensors, bad: Tensor) -> Tensors:
    """Leave out the first tensor, where a bad client is on its own."""
    first = next(iter(message))
    return {n: v for n, v in message.items() if n != first} if bool(bad.all()) else message


POISONS: Mapping[str, tuple[Poison, str]] = {
    "NaN": (entry(torch.nan), "is nan; expected a finite number"),
    "infinity": (entry(torch.inf), "is inf; expected a finite number"),
    "minus infinity": (entry(-torch.inf), "is -inf; expected a finite number"),
    "wrong shape": (whole(lambda v: v[..., None].expand(*v.shape, 2)), "expected shape ["),
    "wrong rows": (whole(lambda v: torch.cat([v, v])), "expected shape [1, ...]"),
    "wrong type": (whole(lambda v: v.half()), "is torch.float16; expected torch."),
    "missing tensor": (missing, "is missing; expected ["),
}
"""kind -> poison, and words of the reason that is to be given."""


class Claiming(Federation):
    """A federation some of whose clients claim a size that cannot be."""

    claims: Mapping[int, float] = {}

    def cohort(self, ids: Tensor) -> Cohort:
        found = super().cohort(ids)
        size = [
            self.claims.get(i, s) for i, s in zip(ids.tolist(), found.size.tolist(), strict=True)
        ]
        return Cohort(found.ids, found.size.new_tensor(size))


def claiming(data: Federation, claims: Mapping[int, float]) -> Federation:
    """Return the federation with these clients' sizes."""
    made = Claiming(**{n: getattr(data, n) for n in Federation.__dataclass_fields__})
    object.__setattr__(made, "claims", claims)
    return made
