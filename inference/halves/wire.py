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

    A view, such as a row of a table, would take the whole table along when it is written.
    """
    return {n: _sealed(v.detach().cpu()) for n, v in found.items()}


def _sealed(value: Tensor) -> Tensor:
    whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole and value.is_contiguous() else value.contiguous().clone()


def told(flat: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a number, text or tuple of an order or a reply; refuse one of another kind."""
    if not isinstance(value := flat.get(name), kind) or isinstance(value, bool):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {found}; expected a {kind.__name__}")
    return value


def named(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the clients that an order or a reply is about."""
    names = flat.get("names")
    if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"names are {names!r}; expected a tuple of names of clients")
    if len(set(names)) < len(names):
        raise ValueError(f"names are {tuple(names)}; expected no two alike")
    return tuple(names)


def column(flat: Mapping[str, Any], name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor with a number for each client; refuse one of another form."""
    value = flat.get(name)
    if not torch.is_tensor(value) or value.shape != (count,) or value.dtype != dtype:
        told = f"{value.dtype} {list(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise ValueError(f"{name} is {told}; expected {dtype} [{count}]")
    return value
