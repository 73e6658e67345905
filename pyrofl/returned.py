"""Values that functions of a method return, validated in one place.

An error is one line that names the function, what it returned and what is valid; the error that a
function raised stays the cause, with its traceback.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyrofl.tensors import Tensors


@contextmanager
def calling(what: str, names: Collection[str] = ()) -> Iterator[None]:
    """Name the function that is called where it raises; a ValueError is one line already.

    Args:
        what: the function.
        names: of the tensors that it may read.
    """
    try:
        yield
    except (ValueError, MemoryError, OSError, Warning):
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        text = f"{type(error).__name__}{f': {first}' if first else ''}"
        named = names and isinstance(error, KeyError)
        expected = f"one of {', '.join(names)}" if named else "no error"
        raise ValueError(f"{what} raises {text}; expected {expected}") from error


def as_tensors(what: str, given: object, clients: int | None = None) -> Tensors:
    """Return a dict of tensors, or refuse what is none.

    Args:
        what: the value, for errors: "what upload returns".
        given: the value.
        clients: length that the first axis of every tensor must have; None allows any shape.

    Raises:
        ValueError: naming the tensor that is unsuitable.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {_kind(given)}; expected a dict of tensors")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{what} holds {name!r}, {_kind(value)}; expected tensors by their names"
            )
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            raise ValueError(f"{what} holds {name!r}, which is not dense; expected dense tensors")
        if value.dtype == torch.complex32:  # which has no sums
            raise ValueError(f"{what} holds {name!r}, a complex32; expected complex64")
        if clients is not None and value.shape[:1] != (clients,):
            raise ValueError(
                f"{what} holds {name!r} of shape {list(value.shape)}; expected "
                f"[{clients}, ...], with the axis of the clients in front"
            )
    return dict(given)


def as_numbers(what: str, given: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    """Return a tensor of a shape, or refuse another value.

    Args:
        what: the value, for errors.
        given: the value.
        shape: of the tensor; where it ends with -1, further axes may follow.
        dtype: torch.bool, torch.long for whole numbers of any type, or None for any numbers.

    Raises:
        ValueError: if it is no such tensor.
    """
    open_end, shape = shape[-1:] == (-1,), tuple(n for n in shape if n >= 0)
    words = {None: "numbers", torch.bool: "bools", torch.long: "whole numbers"}[dtype]
    axes = [*map(str, shape), *["..."] * open_end]
    expected = f"expected a tensor of {words}, [{', '.join(axes)}]"
    if not isinstance(given, Tensor):
        raise ValueError(f"{what} is {_kind(given)}; {expected}")
    if (given.shape[: len(shape)] if open_end else given.shape) != shape:
        raise ValueError(f"{what} has shape {list(given.shape)}; {expected}")
    whole = not given.is_floating_point() or bool((given == given.round()).all())
    if (dtype is torch.bool and given.dtype != dtype) or (dtype is torch.long and not whole):
        raise ValueError(f"{what} is {given.dtype}; {expected}")
    return given


def _kind(value: object) -> str:
    """Name the type of a value with its article."""
    return f"a {type(value).__name__}"
