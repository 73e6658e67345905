"""What goes over the wire: flat dicts of tensors, numbers and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrofl.tensors import Tensors, role

Flat = dict[str, Any]
"""Names -> tensors [C, ...], numbers, texts, or tuples of texts."""

ASKED = ("model", "adapted", "part", "draws", "metrics")  # what a question asks, if it is there


def tensors(what: str, flat: Mapping[str, Any]) -> Tensors:
    """Return the tensors of a role; refuse what is none."""
    found = role(what, flat)
    for name, value in found.items():
        if not torch.is_tensor(value):
            kind = type(value).__name__
            raise ValueError(f"{what}/{name} is a {kind}; expected a tensor")
    return found


def sealed(found: Tensors) -> Tensors:
    """Return tensors on the CPU that have no memory in common with what is not to travel.

    A view, such as a row of a table, would take the whole table along when it is written. What is
    only expanded, as where all clients receive the same, stays so.
    """
    return {n: _sealed(v.detach().cpu()) for n, v in found.items()}


def _sealed(value: Tensor) -> Tensor:
    one = value[:1] if value.dim() and len(value) > 1 and not value.stride(0) else value
    if one.untyped_storage().nbytes() != one.nbytes or not one.is_contiguous():
        one = one.clone(memory_format=torch.contiguous_format)
    return one.expand(value.shape)


def number(flat: Mapping[str, Any], name: str) -> int:
    """Return a whole number of an order or a reply; refuse anything else."""
    if isinstance(value := flat.get(name), bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; expected a whole number")
    return value


def texts(flat: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return texts of an order or a reply; refuse anything else."""
    value = flat.get(name)
    if not isinstance(value, tuple | list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} is {value!r}; expected a tuple of texts")
    return tuple(value)


def named(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the clients that an order or a reply is about, each once."""
    names = texts(flat, "names")
    if len(set(names)) < len(names):
        raise ValueError(f"names is {names}; expected no two alike")
    return names


def column(flat: Mapping[str, Any], name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor with a number for each client; refuse one of another form."""
    value = flat.get(name)
    if not torch.is_tensor(value) or value.shape != (count,) or value.dtype != dtype:
        shown = f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise ValueError(f"{name} is {shown}; expected {dtype} [{count}]")
    return value
